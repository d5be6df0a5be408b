"""``python -m alpa_lite VERB`` is ``alpa-lite VERB``."""

from __future__ import annotations

from alpa_lite.cli import main

if __name__ == "__main__":
    main(prog_name="alpa-lite")
