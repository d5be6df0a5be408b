"""The schedule of a plan: what its pipeline record says, as a table again."""

from __future__ import annotations

from alpa_lite.plan.records import Pipeline
from alpa_lite.schedule.actions import Schedule
from alpa_lite.schedule.csv_table import parse_schedule, schedule_csv
from alpa_lite.schedule.generators import GENERATORS
from alpa_lite.schedule.make import forward_schedule, make_schedule


def planned_schedule(pipeline: Pipeline) -> Schedule:
    """The table that ``pipeline`` was planned with.

    Raises:
        ScheduleError: its rows, of a file that was changed by hand, are no table.
    """
    stages, count = 1 + max(pipeline.stage_of_layer), pipeline.num_microbatches
    if not pipeline.table and pipeline.schedule == "inference":
        return forward_schedule(stages, count)
    if not pipeline.table:
        return make_schedule(pipeline.schedule, stages, count, pipeline.num_chunks)
    text = "\n".join(pipeline.table)
    return parse_schedule(text, name=pipeline.schedule, num_stages=stages, num_microbatches=count)


def table_rows(schedule: Schedule) -> tuple[str, ...]:
    """The table as rows of CSV; none for what a generator makes again from its name."""
    return () if schedule.name in GENERATORS else tuple(schedule_csv(schedule).splitlines())
