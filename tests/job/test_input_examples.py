"""The scripts of examples/inputs, one for each kind of input: all rows are trained, the planted is learnt."""

import re
import runpy
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "examples" / "inputs"
SCRIPTS = (
    "arrow_dataset",
    "arrow_table",
    "csv_file",
    "data_loader",
    "hive_folders",
    "hugging_face",
    "iterable",
    "json_lines",
    "pandas_frame",
    "parquet_file",
    "parquet_glob",
    "polars_frame",
    "tsv_without_header",
)
NEEDED = {"hugging_face": "datasets", "pandas_frame": "pandas"}


def test_there_is_a_test_of_every_script() -> None:
    assert {path.stem for path in FOLDER.glob("*.py")} == {"clicks", *SCRIPTS}


@pytest.mark.parametrize("script", SCRIPTS)
def test_each_kind_of_input(script: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    if (package := NEEDED.get(script)) is not None:
        pytest.importorskip(package, reason=f"pip install {package} to run {script}.py")
    monkeypatch.syspath_prepend(str(FOLDER))
    runpy.run_path(str(FOLDER / f"{script}.py"), run_name="__main__")
    found = re.search(r"^(\d+) of (\d+) rows trained, (\d+) tested: AUC (0\.\d+)$", capsys.readouterr().out, re.M)
    assert found is not None
    assert found.groups()[:3] == ("3000", "3000", "600")
    assert 0.8 < float(found[4]) < 0.95, "the best model has about 0.885"
