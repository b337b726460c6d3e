"""Runs of Megatron-LM's own training scripts, unchanged, with and without a plan; what they logged."""

from __future__ import annotations

import datetime
import importlib.metadata
import os
import re
import shlex
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

sys.path.append(str(Path(__file__).parents[1] / "tests"))

from support.gpu_process import free_port
from support.paths import ROOT

EXACT = {
    "NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0",
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
    "TRITON_CACHE_AUTOTUNING": "1",
}
"""Environment in which two runs of the same work give the same bits, unless they tune Triton's kernels: runs that begin
together tune them each for itself (untuned/ lets them do without)."""
SHAPES = {
    "qwen3-0.6b": "--num-layers 28 --hidden-size 1024 --ffn-hidden-size 3072 --num-attention-heads 16 "
    "--group-query-attention --num-query-groups 8 --kv-channels 128 --qk-layernorm --seq-length 4096 "
    "--max-position-embeddings 4096",
    "llama3.2-1b": "--num-layers 16 --hidden-size 2048 --ffn-hidden-size 8192 --num-attention-heads 32 "
    "--group-query-attention --num-query-groups 8 --kv-channels 64 --rotary-base 500000 --seq-length 8192 "
    "--max-position-embeddings 8192",
    "llama3-70b-quarter": "--num-layers 6 --hidden-size 8192 --ffn-hidden-size 7168 --num-attention-heads 16 "
    "--group-query-attention --num-query-groups 2 --kv-channels 128 --seq-length 4096 --max-position-embeddings 4096",
}
"""The last one is what one of four tensor-parallel ranks computes of six of Llama 3 70B's layers, without its
communication."""
_DROPLESS = (
    "--group-query-attention --qk-layernorm --seq-length 4096 --max-position-embeddings 4096 --moe-grouped-gemm "
    "--moe-router-dtype fp32 --moe-token-dispatcher-type alltoall --moe-router-load-balancing-type aux_loss "
    "--moe-aux-loss-coeff 1e-3 --moe-permute-fusion --moe-router-fusion"
)
EXPERT_SHAPES = {
    "qwen3-30b-a3b": f"{_DROPLESS} --num-layers 8 --hidden-size 2048 --ffn-hidden-size 6144 --num-attention-heads 32 "
    "--num-query-groups 4 --kv-channels 128 --num-experts 128 --moe-router-topk 8 --moe-ffn-hidden-size 768",
    "small": f"{_DROPLESS} --num-layers 12 --hidden-size 1024 --ffn-hidden-size 3072 --num-attention-heads 16 "
    "--num-query-groups 8 --kv-channels 64 --num-experts 32 --moe-router-topk 4 --moe-ffn-hidden-size 512",
}
"""The first has 8 of the 48 layers of Qwen3-30B-A3B; each takes 11 GB in bf16 with states of the optimizer in fp32."""
SMALL = (
    "--num-layers 4 --hidden-size 256 --ffn-hidden-size 768 --num-attention-heads 4 --group-query-attention "
    "--num-query-groups 2 --seq-length 1024 --max-position-embeddings 1024"
)
COMMON = (
    "--swiglu --normalization RMSNorm --disable-bias-linear --position-embedding-type rope "
    "--untie-embeddings-and-output-weights --micro-batch-size 1 --global-batch-size 8 --lr 1e-4 --min-lr 1e-5 "
    "--lr-decay-style constant --bf16 --transformer-impl transformer_engine --no-gradient-accumulation-fusion "
    "--te-rng-tracker --tokenizer-type NullTokenizer --vocab-size 32000 --split 90,5,5 --num-workers 2 "
    "--dataloader-inter-document-masking --no-create-attention-mask-in-dataloader"
)
TORCHRUN_KILLS_AFTER_S = 30
"""Seconds that torchrun gives its ranks to end by themselves."""
DROPOUT = "--attention-dropout 0.1 --hidden-dropout 0.1"
NO_DROPOUT = "--attention-dropout 0 --hidden-dropout 0"
MEASURES = ("lm loss", "grad-norm")
FEW_THREADS = {"TORCHINDUCTOR_COMPILE_THREADS": "1", "OMP_NUM_THREADS": "2", "MAX_JOBS": "1"}
"""Lets runs at the same time not fight for processor cores."""
APEX_STAND_IN = ROOT / "benchmarks" / "apex_stand_in"
"""Folder with what stands for the module of Apex that --gradient-accumulation-fusion imports."""
UNTUNED = ROOT / "benchmarks" / "untuned"
"""Folder that leaves Triton's kernels untuned."""
_STEP = re.compile(r"iteration +(\d+)/ *\d+ \|.*elapsed time per iteration \(ms\): ([\d.]+)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Ran:
    """What one run of a script did."""

    code: int
    """Exit code; 124 where it had to be ended."""
    log: str
    """Everything that it printed."""
    seconds: float
    """Wall-clock seconds of the whole process."""
    scalars: Mapping[str, Mapping[int, float]] = field(default_factory=dict)
    """What Megatron wrote to TensorBoard: values by step, by name."""

    def step_ms(self, *, after: int, average: Callable[[list[float]], float] = statistics.fmean) -> float | None:
        """Milliseconds of a step, averaged over the log lines of steps beyond `after`; None without such lines."""
        kept = [float(ms) for step, ms in _STEP.findall(self.log) if int(step) > after]
        return average(kept) if kept else None

    def count(self, name: str) -> int:
        """One of thdprof's counters of micro-batches, such as "replayed"; 0 where it was not logged."""
        return int(max(self.scalars.get(f"thdprof/{name}", {0: 0}).values()))

    @property
    def eager(self) -> int:
        """Micro-batches that ran eagerly by the plan, those of evaluation too."""
        reasons = [name for name in self.scalars if name.startswith("thdprof/eager/")]
        return sum(self.count(name.removeprefix("thdprof/")) for name in reasons)

    @property
    def error(self) -> str:
        """The last line of its log that names an error."""
        lines = [line.strip() for line in self.log.splitlines() if re.search(r"Error\b|Error:|assert", line)]
        lines = [line for line in lines if "ChildFailedError" not in line]  # torchrun's own, after a rank's
        return lines[-1][:200] if lines else ""


def script_run(
    script: Path,
    flags: Sequence[str],
    folder: Path,
    name: str,
    *,
    plan: Path | None = None,
    replay: bool = True,
    gpus: int = 1,
    hosts: int = 1,
    found_first: Sequence[Path] = (),
    environment: Mapping[str, str] | None = None,
    limit: float = 300,
) -> Ran:
    """Run `script` on `gpus` GPUs of this host, by `plan` through thdprof.run, or unchanged and alone without one.

    Modules are searched for in the folders `found_first`. With several `hosts` there are so many ranks on each GPU.
    `folder` gets the log NAME.log, TensorBoard's files in the folder NAME, and by a plan its counters NAME.jsonl.
    """
    command, ranks = launcher(gpus, hosts)
    if plan is not None:
        command += ["-m", "thdprof.run", "--plan", str(plan), "--replay", "on" if replay else "off"]
        command += ["--stats", str(folder / f"{name}.jsonl")]
    command += [str(script), *flags, "--tensorboard-dir", str(folder / name), "--tensorboard-log-interval", "1"]
    surroundings = {**environment_here(*found_first), **ranks, "CUDA_DEVICE_MAX_CONNECTIONS": "1"}
    began = time.perf_counter()
    printed, code = run(command, {**surroundings, **(environment or {})}, limit=limit)
    seconds = time.perf_counter() - began
    (folder / f"{name}.log").write_text(f"{shlex.join(command)}\nexit code {code}\n{printed}")
    return Ran(code=code, log=printed, seconds=seconds, scalars=scalars_of(folder / name))


def launcher(gpus: int, hosts: int = 1) -> tuple[list[str], dict[str, str]]:
    """The command that starts a script on `gpus` GPUs of this host, up to the script, and its environment's additions.

    `hosts`: how many hosts this one stands for (as_hosts.py); each has a rank on each of the GPUs.
    """
    command, port = [sys.executable, "-W", "ignore"], str(free_port())
    if hosts > 1:
        return [*command, str(ROOT / "benchmarks" / "as_hosts.py"), str(hosts), str(gpus), port], {}
    if gpus > 1:
        return [*command, "-m", "torch.distributed.run", "--nproc-per-node", str(gpus), "--master-port", port], {}
    rank = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    return command, rank


def environment_here(*folders: Path) -> dict[str, str]:
    """This process's environment, in which this tree's thdprof is found first, and then what is in `folders`."""
    path = [str(ROOT), *map(str, folders), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path)}


def run(command: Sequence[str], environment: Mapping[str, str], *, limit: float) -> tuple[str, int]:
    """Output and exit code of a command that may take `limit` seconds.

    No process that it started outlives it: torchrun gives each rank a session of its own, and leaves its ranks behind
    when it is killed before it has killed them.
    """
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        env=dict(environment),
    )
    try:
        return process.communicate(timeout=limit)[0], process.returncode
    except subprocess.TimeoutExpired:
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            return process.communicate(timeout=TORCHRUN_KILLS_AFTER_S + 10)[0], 124
        kill_descendants(process.pid)
        process.kill()
        return process.communicate()[0], 124
    except BaseException:
        kill_descendants(process.pid)
        process.kill()
        raise


def run_thdprof(arguments: Sequence[str], environment: Mapping[str, str] | None = None) -> str:
    """What a command of thdprof printed, with these environment variables besides.

    Raises:
        RuntimeError: the command failed.
    """
    command = [sys.executable, "-m", "thdprof", *arguments]
    printed, code = run(command, {**environment_here(), **(environment or {})}, limit=200)
    if code:
        raise RuntimeError(f"thdprof {shlex.join(arguments)}: exit code {code}\n{printed[-6000:]}")
    return printed


def kill_descendants(pid: int) -> None:
    """Kill the processes that a process has started, and that these have."""
    parents = {}
    for status in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            parents[int(status.parent.name)] = int(status.read_text().rpartition(")")[2].split()[1])
    found = [pid]
    for parent in found:  # which grows as children are found
        found += [child for child, its_parent in parents.items() if its_parent == parent]
    for child in found[1:]:
        with suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)


def file_name(name: str) -> str:
    """A name in letters, digits and dashes."""
    return "".join(c if c.isalnum() else "-" for c in name)


def table(lines: Sequence[Sequence[str]]) -> list[str]:
    """Lines of cells as a Markdown table, with the first line as its head."""
    cells = [[cell.replace("|", "\\|") for cell in line] for line in lines]
    rows = [f"| {' | '.join(line)} |" for line in cells]
    return [rows[0], f"|{'---|' * len(cells[0])}", *rows[1:]]


def heading(title: str, *packages: str) -> list[str]:
    """The first lines of a page of results: title, GPUs, versions of these packages too, date and command."""
    import torch

    from thdprof.runtime.megatron.run_stamp import stamp_here

    here, script = stamp_here(), Path(sys.argv[0]).resolve()
    host = f"{torch.cuda.device_count()} x {here['gpu']}, {here['processor']}"
    stamped = {"torch": "torch", "Transformer Engine": "transformer_engine", "cuDNN": "cudnn"}
    versions = [f"{name} {here[key]}" for name, key in (stamped | {"megatron-core": "megatron_core"}).items()]
    versions += [f"{name} {importlib.metadata.version(name)}" for name in packages]
    today = datetime.datetime.now(tz=datetime.UTC).date()
    command = shlex.join([str(script.relative_to(ROOT) if script.is_relative_to(ROOT) else script), *sys.argv[1:]])
    return [f"# {title}", "", f"{host}; {', '.join(versions)}; {today}", "", f"`python {command}`", ""]


def scalars_of(directory: Path) -> dict[str, dict[int, float]]:
    """Everything in the TensorBoard files of a folder: float32 values by step, by name."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    if not directory.is_dir():
        return {}
    events = EventAccumulator(str(directory), size_guidance={"scalars": 0})
    events.Reload()
    return {
        name: {event.step: event.value for event in events.Scalars(name)} for name in events.Tags().get("scalars", [])
    }


def different_steps(one: Ran, other: Ran, name: str, *, first: int = 1) -> tuple[int, int]:
    """Number of steps from `first` on in which `name` differs between two runs, or is in one alone; number of steps."""
    ours, theirs = one.scalars.get(name, {}), other.scalars.get(name, {})
    steps = sorted(step for step in {*ours, *theirs} if step >= first)
    return sum(1 for step in steps if ours.get(step) != theirs.get(step)), len(steps)


def largest_difference(one: Ran, other: Ran, name: str) -> float:
    """The largest difference of `name` in a step that both runs logged."""
    ours, theirs = one.scalars.get(name, {}), other.scalars.get(name, {})
    return max((abs(ours[step] - theirs[step]) for step in ours.keys() & theirs.keys()), default=0.0)


def write_documents(prefix: Path, *, tokens: int, mean: float, multiple: int = 1, seed: int = 1) -> None:
    """A Megatron dataset of documents with exponential lengths, each a multiple of `multiple`.

    The path `prefix` has no .bin and .idx; `tokens` is the least number in all. Context parallelism wants a multiple of
    twice its size.
    """
    random = np.random.default_rng(seed)

    def document() -> np.ndarray:
        length = max(multiple, int(random.exponential(mean)) // multiple * multiple)
        return random.integers(1, 31_000, length)

    _write_dataset(prefix, document, tokens)


def write_learned(
    prefix: Path,
    *,
    tokens: int = 2_000_000,
    lengths: tuple[float, float] = (4.0, 1.0),
    longest: int = 1024,
    seed: int = 5,
) -> None:
    """A Megatron dataset of `learned_documents`; the logarithms of `lengths` have this mean and standard deviation."""
    random = np.random.default_rng(seed)
    made = learned_documents(random, 1500)
    _write_dataset(prefix, lambda: made(max(8, min(longest, int(random.lognormal(*lengths))))), tokens)


def learned_documents(random: np.random.Generator, vocabulary: int) -> Callable[[int], np.ndarray]:
    """Makes documents of a length whose tokens follow one of a few tables, which the first token names.

    Every token has three successors in a table, so that losses fall fast, and fall less where documents attend to each
    other.
    """
    num_tables, successors = 8, 3
    tables = random.integers(num_tables, vocabulary, (num_tables, vocabulary, successors))

    def document(length: int) -> np.ndarray:
        table = int(random.integers(num_tables))
        found = [table, num_tables + table][:length]
        for choice in random.integers(successors, size=length - len(found)):
            found.append(int(tables[table, found[-1], choice]))
        return np.array(found)

    return document


def _write_dataset(prefix: Path, document: Callable[[], np.ndarray], tokens: int) -> None:
    """Write documents that `document` makes, of so many tokens in all at the least."""
    import torch
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    prefix.parent.mkdir(parents=True, exist_ok=True)
    builder, written = IndexedDatasetBuilder(f"{prefix}.bin", dtype=np.uint16), 0
    while written < tokens:
        made = document()
        builder.add_document(torch.from_numpy(made.astype(np.int64)), [len(made)])
        written += len(made)
    builder.finalize(f"{prefix}.idx")


def merge_flags(*parts: str) -> list[str]:
    """The flags of all parts, in each of which they take the place of the same ones in earlier parts."""
    merged: list[str] = []
    for part in map(shlex.split, parts):
        merged = [*without(merged, *(word for word in part if word.startswith("--"))), *part]
    return merged


def train_conversations(flags: Sequence[str], tokenizer: Path) -> list[str]:
    """The flags, for a script that trains on conversations (--sft) with this tokenizer."""
    kept = without(flags, "--tokenizer-type", "--vocab-size", "--dataloader-inter-document-masking")
    return [*kept, "--sft", "--tokenizer-type", "SFTTokenizer", "--tokenizer-model", str(tokenizer)]


def without(flags: Sequence[str], *names: str) -> list[str]:
    """The flags without these and their values."""
    kept, dropping = [], False
    for flag in flags:
        if flag.startswith("--"):
            dropping = flag in names
        if not dropping:
            kept.append(flag)
    return kept


def plan_of(
    flags: Sequence[str],
    directory: Path,
    name: str,
    *,
    gpus: int = 1,
    caps: Sequence[float] = (),
    layers_per_graph: int | str | None = None,
    impl: str = "chunk",
    modules: Sequence[str] | None = None,
    more: Sequence[str] = (),
) -> Path:
    """The plan that `thdprof analyze --megatron-args` writes for a script with these flags.

    Args:
        flags: the script's arguments.
        directory: folder to write to.
        name: stem of the files.
        gpus: number of ranks.
        caps: replace its buckets by one at each of these shares of micro-batches, so that the rest runs eagerly.
        layers_per_graph: layers of one graph, or "all"; None: as `analyze` predicts that steps are shortest.
        impl: the kind of graphs.
        modules: captured parts of layers with experts; None: as `analyze` writes them.
        more: further arguments of `analyze`.
    """
    script, plan, table = (directory / f"{name}{end}" for end in (".sh", ".yaml", ".parquet"))
    script.write_text(f"torchrun --nproc-per-node {gpus} pretrain_gpt.py {shlex.join(flags)}\n")
    command = ["analyze", "--megatron-args", str(script), "--impl", impl]
    command += ["--microbatches", str(table), "-o", str(plan), "--force", *more]
    chosen = {} if layers_per_graph is None else {"layers_per_graph": layers_per_graph}
    exchanges = "moe_preprocess" in (modules or ()) and "alltoall" in flags  # counts of tokens, inside the graphs
    if exchanges and "--expert-model-parallel-size" in flags:  # whose ranks decide together
        chosen["shared_capture_ranks"] = flags[[*flags].index("--expert-model-parallel-size") + 1]
    if chosen:
        settings = directory / f"{name}-settings.yaml"
        settings.write_text("".join(f"{key}: {value}\n" for key, value in chosen.items()))
        command += ["--settings", str(settings)]
    run_thdprof(command)
    if caps:
        with_caps(plan, table, caps, impl=impl)
    if modules is not None:
        change_graphs(plan, plan, modules=list(modules))
    return plan


def change_graphs(plan: Path, to: Path, **changed: Any) -> Path:
    """Write a plan with other values in `graphs` to another path, or in its place; returns the path."""
    from thdprof.plan import Plan, load_plan

    values = load_plan(plan).model_dump(mode="json", by_alias=True)
    Plan.model_validate({**values, "graphs": values["graphs"] | changed}).save(to, force=True)
    return to


def with_caps(plan: Path, table: Path, shares: Sequence[float], *, impl: str = "chunk") -> None:
    """Give a plan one bucket at each of these shares of the micro-batches of `table`, as ranks decide on them.

    A plan that captures nothing, because graphs were predicted to save no time, gets graphs of kind `impl`.
    """
    import pyarrow.parquet as pq

    from thdprof.plan import Plan, load_plan

    loaded = load_plan(plan)
    values = loaded.model_dump(mode="json", by_alias=True)
    counted = pq.read_table(table, columns=["step", "dp_rank", "microbatch", "n_seqs"]).to_pandas()
    ranks = counted["dp_rank"] // loaded.training.shared_capture_ranks
    n_seqs = counted.groupby([counted["step"], ranks, counted["microbatch"]])["n_seqs"].transform("max").to_numpy()
    caps = sorted({int(cap) for cap in np.quantile(n_seqs, shares, method="inverted_cdf")})
    longest, buckets, below = loaded.training.seq_length * loaded.training.micro_batch_size, [], 0
    cp_size = loaded.training.context_parallel_size
    for cap in caps:
        held = int((n_seqs <= cap).sum())
        share = (held - below) / len(n_seqs)
        buckets.append({"max_seqs": cap, "max_seqlen": longest, "cp_size": cp_size, "share": share})
        below = held
    values["predictions"]["fallback_rate"]["microbatch"] = 1 - below / len(n_seqs)
    values["graphs"] |= {"buckets": buckets} | ({"impl": impl} if loaded.graphs.impl == "none" else {})
    Plan.model_validate(values).save(plan, force=True)
