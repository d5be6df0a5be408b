"""Stages and microbatches to instruction lists and their timeline. Knows no JAX.

``actions`` and ``generators`` hold the first level, the action table; ``step_io`` says what each program reads and writes;
``emit`` makes the second level of both, per-mesh instruction lists; ``simulate`` plays these through. After each pass stands
its verifier: ``check``, ``step_check``, ``instruction_check``.
"""

from alpa_lite.schedule.actions import Action as Action
from alpa_lite.schedule.actions import ActionKind as ActionKind
from alpa_lite.schedule.actions import Schedule as Schedule
from alpa_lite.schedule.check import check_schedule as check_schedule
from alpa_lite.schedule.csv_table import parse_schedule as parse_schedule
from alpa_lite.schedule.csv_table import read_schedule as read_schedule
from alpa_lite.schedule.csv_table import schedule_csv as schedule_csv
from alpa_lite.schedule.csv_table import write_schedule as write_schedule
from alpa_lite.schedule.donation import donated_inputs as donated_inputs
from alpa_lite.schedule.emit import emit_instructions as emit_instructions
from alpa_lite.schedule.formulas import bubble_s as bubble_s
from alpa_lite.schedule.formulas import peak_residuals as peak_residuals
from alpa_lite.schedule.generators import GENERATORS as GENERATORS
from alpa_lite.schedule.in_flight import InFlight as InFlight
from alpa_lite.schedule.in_flight import in_flight as in_flight
from alpa_lite.schedule.in_flight import mesh_residuals as mesh_residuals
from alpa_lite.schedule.instruction_check import check_instructions as check_instructions
from alpa_lite.schedule.instructions import Instructions as Instructions
from alpa_lite.schedule.make import forward_schedule as forward_schedule
from alpa_lite.schedule.make import make_schedule as make_schedule
from alpa_lite.schedule.planned import planned_schedule as planned_schedule
from alpa_lite.schedule.planned import table_rows as table_rows
from alpa_lite.schedule.simulate import simulate as simulate
from alpa_lite.schedule.simulate import simulate_schedule as simulate_schedule
from alpa_lite.schedule.step_io import Buffer as Buffer
from alpa_lite.schedule.step_io import Origin as Origin
from alpa_lite.schedule.step_io import Port as Port
from alpa_lite.schedule.step_io import StageIO as StageIO
from alpa_lite.schedule.step_io import StepIO as StepIO
from alpa_lite.schedule.step_io import chain_step as chain_step
from alpa_lite.schedule.timeline import Event as Event
from alpa_lite.schedule.timeline import Timeline as Timeline
from alpa_lite.schedule.timeline import chrome_trace as chrome_trace
from alpa_lite.schedule.timeline import timeline_text as timeline_text
from alpa_lite.schedule.timeline import write_trace as write_trace
