"""Feeds what `thdprof export` writes to released trainers' configuration classes, each in an environment of its own.

    python tools/export_parsers.py [TARGET ...]

The environments lie in a temporary folder and see the packages of this one. A trainer is installed without its
dependencies, and with what its configuration needs. Prints the version of each and what its configuration holds.
Levanter has no release with the limit; its wheel is marin's nightly one, which needs all its dependencies.
"""

from __future__ import annotations

import subprocess
import sys
import sysconfig
import tempfile
import venv
from pathlib import Path

from thdprof.analyze.export import export_plan
from thdprof.plan import Plan, load_plan

AXOLOTL = """
import yaml
from axolotl.utils.schemas.config import AxolotlInputConfig
given = yaml.safe_load(open(sys.argv[1])) | {"base_model": "x", "learning_rate": 1e-5, "gradient_accumulation_steps": 1}
read = AxolotlInputConfig(**given, datasets=[{"path": "x", "type": "alpaca"}])
print({key: getattr(read, key) for key in yaml.safe_load(open(sys.argv[1]))})
"""
MAXTEXT = """
import yaml
from maxtext.configs.types import MaxTextConfig
from pydantic import TypeAdapter
given, read = yaml.safe_load(open(sys.argv[1])), {}
for key, value in given.items():
    read[key] = TypeAdapter(MaxTextConfig.model_fields[key].rebuild_annotation()).validate_python(value, strict=True)
print(read)
"""
VERL = """
import os, hydra, verl.trainer.config
lines = [line for line in open(sys.argv[1]).read().splitlines() if not line.startswith("#")]
with hydra.initialize_config_dir(os.path.dirname(verl.trainer.config.__file__), version_base=None):
    read = hydra.compose("ppo_trainer", overrides=lines).actor_rollout_ref.actor.fsdp_config
print({key: read[key] for key in ("_target_", "pad_to_length", "pad_to_length_bucket")})
"""
LEVANTER = """
import draccus
from levanter.data.text.datasets import _resolve_pack_config
from levanter.main.train_lm import TrainLmConfig
read = draccus.parse(TrainLmConfig, config_path=sys.argv[1], args=[])
(component,) = read.data.components.values()
most, _ = _resolve_pack_config(component.pack)
print({"pack": component.pack, "max_segments_per_example": most, "train_seq_len": read.train_seq_len})
"""
READERS = {
    "axolotl": ("axolotl==0.21.0", AXOLOTL, "addict"),
    "maxtext": (
        "maxtext==0.2.5",
        MAXTEXT,
        "jax flax orbax-checkpoint pathwaysutils fastapi opentelemetry-exporter-otlp",
    ),
    "levanter": ("marin-levanter==0.2.227.dev40316220070", LEVANTER, "marin-levanter==0.2.227.dev40316220070"),
    "verl": ("verl==0.9.1", VERL, "hydra-core ray tensordict"),
}
"""The trainer's wheel, what reads the export there, and packages that reading needs, by target."""


def read_export(plan: Plan, target: str, directory: Path) -> str:
    """What a released trainer's configuration holds after it has read the export of `plan`.

    Raises:
        subprocess.CalledProcessError: the trainer refuses it.
    """
    wheel, code, others = READERS[target]
    venv.create(directory / target, with_pip=True)
    python = directory / target / "bin" / "python"
    (site,) = (directory / target).glob("lib/python*/site-packages")
    (site / "zz.pth").write_text(sysconfig.get_path("purelib") + "\n")
    for words in (["--no-deps", wheel], others.split()):
        subprocess.run([python, "-m", "pip", "install", "-q", *words], check=True)
    exported = directory / f"{target}.txt"
    exported.write_text(export_plan(plan, target).text)
    done = subprocess.run([python, "-c", "import sys" + code, exported], capture_output=True, text=True, check=False)
    if done.returncode:
        sys.stderr.write(done.stderr)
    done.check_returncode()
    return f"{wheel}: {done.stdout.splitlines()[-1]}"


def main() -> None:
    """Analyze the demo's packs, for MaxText its own, and feed the plans' exports to the trainers."""
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        command = [sys.executable, "-m", "thdprof"]
        subprocess.run([*command, "demo", directory / "demo"], check=True, capture_output=True)
        for target in sys.argv[1:] or READERS:
            plan = directory / f"{target}.yaml"
            packed = ["lengths", "--packer", "maxtext_best_fit"] if target == "maxtext" else ["bridge"]
            words = [*command, "analyze", directory / "demo" / packed[0], *packed[1:], "-o", plan]
            subprocess.run(words, check=True, capture_output=True)
            print(read_export(load_plan(plan), target, directory), flush=True)


if __name__ == "__main__":
    main()
