"""The cases of the golden set: a function for each group, and the scripts and settings that are drawn by a seed.

The values that are drawn from lie in `tests/golden/cases/*.yaml`.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from golden import Case

_VALUES = Path(__file__).resolve().parents[1] / "tests" / "golden" / "cases"
_PLAN = ("--json", "-o", "plan.yaml")


def _load(name: str) -> Any:
    return yaml.safe_load((_VALUES / f"{name}.yaml").read_text())


def _words(text: str | Sequence[str]) -> list[str]:
    return text.split() if isinstance(text, str) else [*map(str, text)]


# --- the demo data --------------------------------------------------------------------------------------------------


def demo() -> list[Case]:
    """Every format of the demo data through every command that reads a dataset or a plan."""
    values = _load("demo")
    cases = [case for name, words in values["formats"].items() for case in _of_format(name, _words(words))]
    for name, case in values["others"].items():
        files = {
            file: text if isinstance(text, str) else json.dumps(text) for file, text in case.get("files", {}).items()
        }
        cases.append(Case(name=name, files=files, commands=[_words(words) for words in case["commands"]]))
    return cases


def _of_format(name: str, data: list[str]) -> Iterator[Case]:
    analyze = ["thdprof", "analyze", *data]
    planned = [*analyze, "-o", "plan.yaml", "--profile", "plan.profile.parquet"]
    after = {
        "analyze": [analyze, [*analyze, *_PLAN, "--microbatches", "table.parquet"]],
        "check": [
            planned,
            *(_words(f"thdprof check plan.yaml {more}") for more in ("", "--json", "demo/lengths --level microbatch")),
        ],
        "report": [
            planned,
            *(_words(f"thdprof report plan.yaml {more}") for more in ("", "--json", "--cap 40", "-o report.html")),
        ],
        "export": [
            planned,
            *(
                _words(f"thdprof export plan.yaml --to {target} {more}")
                for target in ("megatron-lm", "megatron-lm-dev", "megatron-bridge", "json")
                for more in ("", "--max-seqs 40", f"-o {target}")
            ),
        ],
        "sweep": [
            ["thdprof", "sweep", *data, *_words(more)]
            for more in (
                "buckets=1,2,3 context-parallel-size=1,2",
                "micro-batch-size=1,2 --json",
                "buckets=1,2 pipeline-parallel-size=1,2 -o plans",
            )
        ],
    }
    for command, commands in after.items():
        yield Case(name=f"{name}: {command}", commands=commands)


# --- launch scripts of Megatron-LM ------------------------------------------------------------------------------------


def scripts() -> list[Case]:
    """120 launch scripts: every model, feature and style in turn, the sizes drawn."""
    values = _load("scripts")
    return [_script(number, values) for number in range(120)]


_WITH_BLOCKS = ("conditions", "choices", "functions")
"""Styles of scripts that only bash can expand."""


def _script(number: int, values: Mapping[str, Any]) -> Case:
    rng = random.Random(f"script {number}")
    model = [*values["models"]][number % len(values["models"])]
    chosen = _features(number, values["features"], values["refused"], rng)
    sizes = dict(rng.choice(values["sizes"]))
    ranks = sizes["tp"] * sizes["pp"] * sizes["cp"] * sizes["dp"]
    batch = rng.choice([8, 16, 32]) * sizes["dp"]
    groups = {
        "MODEL_ARGS": values["models"][model],
        "PARALLEL_ARGS": f"--tensor-model-parallel-size {sizes['tp']} --pipeline-model-parallel-size {sizes['pp']} "
        f"--context-parallel-size {sizes['cp']} "
        + (f"--expert-model-parallel-size {min(sizes['dp'], 4)} " if "--num-experts" in values["models"][model] else "")
        + ("--sequence-parallel " if sizes["tp"] > 1 else "")
        + sizes.get("more", ""),
        "TRAINING_ARGS": f"--micro-batch-size 1 --global-batch-size {batch} --train-iters {rng.choice([50, 120, 300])} "
        f"--lr 1.0e-4 --bf16 --seed {rng.choice([1234, 42])} --te-rng-tracker",
        "DATA_ARGS": "--data-path demo/megatron/documents --split 949,50,1 "
        f"--seq-length {rng.choice([1024, 2048, 4096])} --max-position-embeddings 8192 "
        f"--dataloader-type {rng.choice(['single', 'cyclic'])} --dataloader-inter-document-masking",
        "EXTRA_ARGS": " ".join(chosen.values()),
    }
    style = [*values["styles"]][number // 2 % len(values["styles"])]
    instead = {values["instead"].get(name) for name in chosen}
    pairs = {name: [pair for pair in _pairs(text.split()) if pair[0] not in instead] for name, text in groups.items()}
    text = _written(style, values["styles"][style], pairs, nodes=max(1, ranks // 8), on_node=min(ranks, 8), rng=rng)
    kinds = ["", "", "--impl transformer_engine", "--impl chunk", "--impl local"]
    impl = rng.choice(kinds[: 3 if model == "dropless experts" else 4 if sizes["pp"] > 1 else 5])
    analyze = f"thdprof analyze demo/megatron --megatron-args run.sh {impl} {rng.choice(['', '--gpu h200'])}"
    plain = [word.strip("'\"") for group in pairs.values() for pair in group for word in pair]
    own = [f"WORLD_SIZE={ranks}", "thdprof.run", "--plan", "plan.yaml", "pretrain_gpt.py", *plain]
    read = [*_words(analyze), *_PLAN]
    launcher = ["torchrun", f"--nproc-per-node={min(ranks, 8)}", f"--nnodes={max(1, ranks // 8)}"]
    expanded = [*_words(analyze.replace("--megatron-args run.sh", "")), *_PLAN, "--", *launcher, *own[4:]]
    return Case(
        name=f"script {number}: {model}; {', '.join(chosen)}; {style}",
        files={"run.sh": text, "pretrain_gpt.py": ""},
        commands=[_words(analyze)] * (number % 10 == 0) + [read] + [expanded] * (style in _WITH_BLOCKS) + [own],
    )


def _features(
    number: int, features: Mapping[str, str], refused: Mapping[str, str], rng: random.Random
) -> dict[str, str]:
    """Names and flags of a script's features: each in turn, up to two drawn ones, none of which give a flag again."""
    names = [[*features][number % len(features)], *rng.sample([*features], 2)]
    if number % 3 == 2:
        names.insert(0, [*refused][number // 3 % len(refused)])
    chosen: dict[str, str] = {}
    for name in names:
        flags = {**features, **refused}[name]
        if not {word for word in flags.split() if word.startswith("--")} & {*" ".join(chosen.values()).split()}:
            chosen[name] = flags
    return chosen


def _pairs(words: Sequence[str]) -> Iterator[list[str]]:
    """Each flag with its values."""
    pair: list[str] = []
    for word in words:
        if word.startswith("--") and pair:
            yield pair
            pair = []
        pair.append(word)
    yield pair


def _written(
    style: str, template: str, pairs: Mapping[str, list[list[str]]], *, nodes: int, on_node: int, rng: random.Random
) -> str:
    """A launch script in the style of `template`, in which `@NAME@` stands for the flags of a group.

    `@NAME@` alone in a line has a line for each flag, with the line's own indent and end.
    """
    lines = []
    for line in template.replace("@NODES@", str(nodes)).replace("@ON_NODE@", str(on_node)).splitlines():
        alone = line.strip(" \\").strip("@")
        if alone in pairs:
            lines += [line.replace(f"@{alone}@", " ".join(_with_variables(pair, style))) for pair in pairs[alone]]
            continue
        for group, flags in pairs.items():
            line = line.replace(f"@{group}@", " ".join(" ".join(_with_variables(pair, style)) for pair in flags))
        lines.append(line)
    if lines[0].startswith("#!") and rng.random() < 0.3:
        lines.insert(1, "# Don't forget: export HF_TOKEN before this.")
    return "\n".join(lines) + "\n"


def _with_variables(pair: list[str], style: str) -> list[str]:
    """A flag whose value is given as users of the style do."""
    name, *values = pair
    if len(values) == 1 and values[0].isdigit():
        number = int(values[0])
        if style == "defaults":
            return [name, f"${{{name.strip('-').upper().replace('-', '_')}:-{number}}}"]
        if style == "arithmetic" and number % 2 == 0:
            return [name, f"$(( {number // 2} * TWO ))"]
    return [f"{name}={values[0]}"] if style == "equals" and len(values) == 1 else pair


# --- settings -------------------------------------------------------------------------------------------------------


def settings() -> list[Case]:
    """Settings of data, batches and limits: each is off its default at least twice; and values that are refused."""
    values = _load("settings")
    cases = _drawn({data: atoms for data, atoms in values["atoms"].items() if "model" not in data}, values)
    for data, every in values["alone"].items():
        for number, chosen in enumerate(every):
            cases.append(_setting(f"{data} {number}, alone: {chosen}", values["data"][data], chosen))
    return cases


def model_settings() -> list[Case]:
    """Settings of the model, its precision and its parallelism: each is off its default at least twice."""
    values = _load("settings")
    return _drawn({data: atoms for data, atoms in values["atoms"].items() if "model" in data}, values)


def _drawn(every: Mapping[str, Any], values: Mapping[str, Any]) -> list[Case]:
    cases = []
    for data, atoms in every.items():
        model = values["model"] if "model" in data else {}
        drawn = _joined(atoms, values["together"].get(data, 2), random.Random(f"settings of {data}"))
        for number, chosen in enumerate(drawn):
            words = values["data"][data.partition(",")[0]]
            cases.append(_setting(f"{data} {number}: {', '.join(chosen)}", words, {**model, **chosen}))
    return cases


def _joined(atoms: Sequence[Mapping[str, Any]], count: int, rng: random.Random) -> Iterator[dict[str, Any]]:
    """All atoms, up to `count` of them together; those that give the same setting are kept apart."""
    left = rng.sample([*atoms], len(atoms))
    while left:
        chosen = dict(left.pop(0))
        for _ in range(count - 1):
            other = next((atom for atom in left if not {*atom} & {*chosen}), None)
            if other is not None:
                left.remove(other)
                chosen |= other
        yield chosen


def _setting(name: str, data: str, chosen: Mapping[str, Any] | str) -> Case:
    """A case whose settings stand in a file; those with dashes, and all that are text, are options."""
    analyze = ["thdprof", "analyze", *data.split()]
    files = {name: (_VALUES / name).read_text() for name in ("costs.yaml", "steep.yaml")}
    if isinstance(chosen, str):
        analyze += chosen.split()
    else:
        inside = {key: value for key, value in chosen.items() if not key.startswith("--")}
        files["settings.yaml"] = yaml.safe_dump(inside, sort_keys=False)
        analyze += ["--settings", "settings.yaml"]
        analyze += [word for key in chosen if key not in inside for word in (key, str(chosen[key]))]
    has_text = " 0:" in name or " 5:" in name
    return Case(name=name[:110], files=files, commands=[analyze] * has_text + [[*analyze, *_PLAN]])


# --- models, recipes, and what training refuses and decides ----------------------------------------------------------


def models() -> list[Case]:
    """Models out of config.json, out of recipes, and the coverage of Megatron-Bridge's own recipes."""
    values = _load("models")
    cases = []
    for name, config in values["configs"].items():
        text = config if isinstance(config, str) else json.dumps(config)
        cases.append(_model(f"config, {name}", "config.json", text))
    for name, recipe in values["recipes"].items():
        cases.append(_model(f"recipe, {name}", "recipe.yaml", yaml.safe_dump(recipe, sort_keys=False)))
    return cases


def _model(name: str, file: str, text: str) -> Case:
    analyze = _words(f"thdprof analyze demo/bridge --model {file} --global-batch-size 64 --gpu h100")
    return Case(name=name, files={file: text}, commands=[[*analyze, *_PLAN]])


def recipes() -> list[Case]:
    """The coverage of Megatron-Bridge's performance recipes."""
    return [Case(name="recipes", commands=[["recipe_coverage"]])]


def training() -> list[Case]:
    """What `install` and the Trainer's callback refuse before a run, on a processor."""
    cases = []
    for program, named in _load("training").items():
        for name, arguments in named.items():
            words = [program, *(json.dumps(argument) for argument in arguments)]
            cases.append(Case(name=f"{program}, {name}", commands=[words]))
    return cases


def runtime() -> list[Case]:
    """What training decides about micro-batches, what it reads of them, and what it counts and says."""
    values = _load("runtime")
    runs, costs = values.pop("runs"), yaml.safe_dump(values.pop("costs"))
    cases = [
        Case(name=f"{function}, {name}", commands=[["runtime", function, *map(json.dumps, arguments)]])
        for function, named in values.items()
        for name, arguments in named.items()
    ]
    for name, run in runs.items():
        words = [{"plan": "plan.yaml"}, run["micro_batches"], {"stats": "stats.jsonl"}]
        commands = [
            _words(f"thdprof analyze data.jsonl {run['analyze']} -o plan.yaml"),
            ["runtime", "train", *map(json.dumps, words)],
            _words("thdprof compare plan.yaml stats.jsonl"),
            _words("thdprof compare plan.yaml stats.jsonl --json"),
        ]
        cases.append(
            Case(name=f"run, {name}", files={"data.jsonl": run["data"], "costs.yaml": costs}, commands=commands)
        )
    return cases


GROUPS: dict[str, Callable[[], list[Case]]] = {
    "demo": demo,
    "scripts": scripts,
    "settings": settings,
    "model_settings": model_settings,
    "models": models,
    "recipes": recipes,
    "training": training,
    "runtime": runtime,
}
"""The cases of each group; a group's record is `tests/golden/GROUP.txt`."""
