"""What the page on clusters and the manifest for Kubernetes name is there."""

import re
import shlex
import shutil
import subprocess
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml

from shadowsync.choices import choose_all
from shadowsync.config import ClusterConfig, load
from shadowsync.metrics.history import Frame

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "cluster.md").read_text("utf-8")


def manifest() -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load((ROOT / "examples" / "rayjob.yaml").read_text("utf-8"))
    return found


def test_the_manifests_command_is_one_that_trains() -> None:
    program, command, *words = shlex.split(manifest()["spec"]["entrypoint"])
    assert (program, command, words[-2]) == ("shadowsync", "train", "--out")
    config = load(None, words[:-2])
    choose_all(config, own_model=False)
    assert (config.cluster.runtime, config.cluster.address) == ("ray", "auto")
    head = manifest()["spec"]["rayClusterSpec"]["headGroupSpec"]["template"]
    (container,) = head["spec"]["containers"]
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    assert (
        ports["figures"] == config.report.prometheus_port == int(head["metadata"]["annotations"]["prometheus.io/port"])
    )
    (mount,) = container["volumeMounts"]
    assert words[-1].startswith(mount["mountPath"] + "/")
    assert mount["name"] in {volume["name"] for volume in head["spec"]["volumes"]}


def test_the_manifests_trainers_and_servers_have_room() -> None:
    config = load(None, shlex.split(manifest()["spec"]["entrypoint"])[2:-2])
    (group,) = manifest()["spec"]["rayClusterSpec"]["workerGroupSpecs"]
    (container,) = group["template"]["spec"]["containers"]
    cpus = group["replicas"] * int(container["resources"]["requests"]["cpu"])
    assert cpus >= config.train.trainers * config.train.workers
    assert group["minReplicas"] <= group["replicas"] <= group["maxReplicas"]


def test_the_batch_script_is_one_of_bash_and_its_command_is_one_that_trains() -> None:
    (script,) = re.findall(r"^```bash\n(.*?)^```$", PAGE, re.M | re.S)
    bash = shutil.which("bash")
    checked = subprocess.run([bash, "-n"], input=script, capture_output=True, text=True, check=False, timeout=120)
    assert (checked.returncode, checked.stderr) == (0, "")
    for part in ("srun", "start --head --block", '--node-ip-address="$head_ip"', "start --block --address"):
        assert part in script
    assert "127.0.0.1" not in script
    command = script[script.index('"$software/shadowsync"') : script.index(" &\ntrainer=")].replace("\\\n", "")
    words = shlex.split(command.replace("$SLURM_JOB_NUM_NODES", "3").replace("$address", "10.0.0.1:6379"))
    assert (words[1], words[-2]) == ("train", "--out")
    choose_all(load(None, words[2:-2]), own_model=False)


def test_the_page_names_every_key_of_the_section() -> None:
    assert set(re.findall(r"`cluster\.([a-z_]+)", PAGE)) == set(ClusterConfig.model_fields)


def test_the_page_names_every_metric_that_an_operator_wants_and_no_other() -> None:
    pytest.importorskip("prometheus_client", reason="needs prometheus-client")
    from shadowsync.report.prometheus import metrics  # noqa: PLC0415 an extra

    frame = Frame(
        seconds=1.0,
        samples=1,
        total_samples=2,
        eps=1.0,
        eps_per_trainer=(1.0,),
        auc=0.5,
        ne_window=1.0,
        ne_lifetime=1.0,
        loss=0.7,
        sync_count=1,
        sync_gap=1.0,
        replica_distance=0.1,
        wire_bytes={"pull": 1},
        saves=0,
    )
    full = msgspec.structs.replace(
        frame,
        wire_raw_bytes={"pull": 1},
        wire_codecs={"pull": "int8"},
        wire_kept_share={"pull": 0.1},
        wire_refreshes={"pull": 1},
        roles={"driver": "alive"},
        queue_depth={"driver": 0},
        staleness=0.0,
        pls=0.0,
        target_pls=0.1,
        recovery_seconds={"save": 0.0},
    )
    served = {sample.name for metric in metrics(full) for sample in metric.samples}
    named = set(re.findall(r"shadowsync_[a-z_]+[a-z]", PAGE))
    assert named <= served
    assert served - named <= {
        "shadowsync_training_seconds_total",
        "shadowsync_log_loss",
        "shadowsync_replica_distance_ratio",
    }
