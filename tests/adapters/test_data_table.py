"""docs/data.md has a table of what is exact after a resume within an epoch, with each tool. This is where it comes from."""

from importlib.metadata import version
from pathlib import Path

import data_tools as tools
import pytest

pytestmark = [pytest.mark.timeout(300), pytest.mark.filterwarnings("ignore")]
PAGE = Path(__file__).parents[2] / "docs/data.md"
OURS = {
    "`resumable(loader)`, plain torch": (tools.plain, {}),
    "Accelerate with safe_ckpt": (tools.accelerate, {"safe": True}),
    "Lightning with safe_ckpt": (tools.lightning, {"safe": True}),
    "Transformers with safe_ckpt": (tools.transformers, {"safe": True}),
}
PEERS = {
    f"torchdata {version('torchdata').split('+')[0]}, `StatefulDataLoader`": (tools.torchdata, {}),
    f"Accelerate {version('accelerate')}, `skip_first_batches`": (tools.accelerate, {}),
    f"Lightning {version('lightning')}, `ModelCheckpoint`": (tools.lightning, {}),
    f"Transformers {version('transformers')}, `Trainer`": (tools.transformers, {}),
}
DATA = {
    "map": (tools.Map, 0),
    "map, workers": (tools.Map, 2),
    "stream": (tools.Stream, 0),
    "stream, workers": (tools.Stream, 2),
}


def row(name, tool, more, folder):
    cells = []
    for kind, (data, workers) in DATA.items():
        samples, drawn, beyond = tools.found(tool, data, workers, folder / kind, **more)
        cells += ["yes" if samples else "no", "yes" if drawn else "no", str(max(0, beyond))]
    return f"| {name} | {' | '.join(cells)} |"


@pytest.mark.parametrize("name", [*OURS, *(pytest.param(name, marks=pytest.mark.thorough) for name in PEERS)])
def test_the_table_of_exactness_in_the_data_page_is_what_is_measured(tmp_path, name):
    """Row by row: are the samples the same, is what was drawn for them, how many were read that were not used."""
    made = row(name, *{**OURS, **PEERS}[name], tmp_path)
    assert made in PAGE.read_text().splitlines(), f"the row of docs/data.md should be:\n{made}"
