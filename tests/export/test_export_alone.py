"""The file in a process that has torch and cannot import shadowsync."""

import json
import subprocess
import sys
from pathlib import Path

import torch
from export_cases import CASES, export, job_logits, make_inputs

TORCH_2_9 = "ignore:The given buffer is not writable:UserWarning"
"""Its loader says so of what it reads itself."""
SCRIPT = """
import json, sys

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("shadowsync", "fbgemm_gpu", "safetensors", "msgspec", "pydantic"):
            raise ModuleNotFoundError(name)

sys.meta_path.insert(0, Absent())
import torch

model = torch.export.load(sys.argv[1]).module()
dense, values, offsets, weights = json.loads(sys.stdin.read())
answer = model(torch.tensor(dense), torch.tensor(values), torch.tensor(offsets), torch.tensor(weights))
assert not [name for name in sys.modules if name.startswith("shadowsync")]
print(json.dumps([answer["probabilities"].tolist(), answer["logits"].tolist()]))
"""


def test_torch_alone_loads_and_predicts(tmp_path: Path) -> None:
    case = CASES["dcn, mixed widths, weights"]
    path = tmp_path / "model.pt2"
    module = export(case, path)
    inputs = make_inputs(case, 7)
    done = subprocess.run(
        [sys.executable, "-I", "-W", "error", "-W", TORCH_2_9, "-c", SCRIPT, str(path)],
        input=json.dumps([tensor.tolist() for tensor in inputs]),
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    probabilities, logits = (torch.tensor(numbers) for numbers in json.loads(done.stdout))
    wanted = job_logits(case, module, inputs)
    torch.testing.assert_close(logits, wanted, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(probabilities, wanted.sigmoid(), rtol=1e-6, atol=1e-6)
