"""The pages of docs/ are true: commands and Python run and print what is shown, numbers come from committed results."""

from __future__ import annotations

import argparse
import ast
import contextlib
import functools
import importlib
import importlib.util
import inspect
import io
import os
import re
import shlex
import shutil
import subprocess
import sys
import types
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import yaml
from pydantic import BaseModel, ConfigDict
from support.command import run_in_process
from support.paths import ROOT

from thdprof import run
from thdprof.analyze.sources.demo import write_demo
from thdprof.dispatch import FallbackReason
from thdprof.megatron_limits import LIMITS

DOCS = ROOT / "docs"
PAGES = sorted(DOCS.glob("*.md"))
README = ROOT / "README.md"
RUN = {"console", "bash", "python", "output", "yaml"}
"""Fences that are run, or belong to what is; `text` is compared below."""
PARSED = {"gpu", "own"}
"""Commands that need a GPU or somebody's own files: their options are parsed."""

sys.path.insert(0, str(DOCS / "tools"))
import cli_reference  # noqa: E402
import plan_reference  # noqa: E402
import python_reference  # noqa: E402
import references  # noqa: E402
import settings_reference  # noqa: E402


@dataclass(frozen=True, slots=True, kw_only=True)
class Fence:
    """A fenced block of a page."""

    kind: str
    title: str
    text: str


def written(path: Path) -> str:
    """A page without its generated parts."""
    return references.PART.sub("", path.read_text())


def fences(path: Path) -> list[Fence]:
    found = re.findall(r"^```(\w*)(?: title=\"([^\"]*)\")?\n(.*?)^```$", written(path), re.M | re.S)
    return [Fence(kind=kind, title=title, text=text) for kind, title, text in found]


def test_every_fence_is_one_that_is_checked():
    for page in PAGES:
        assert written(page).count("```") == 2 * len(fences(page)), page
        for fence in fences(page):
            assert fence.kind in RUN | PARSED | {"text"}, (page, fence)
            assert fence.kind != "text" or page.name in ("troubleshooting.md", "choosing-a-cap.md"), fence


# --- commands and Python that run -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """A command of a console block, and what the page shows of its output."""

    line: str
    shown: str


def commands(text: str) -> Iterator[Command]:
    for part in re.split(r"^\$ ", text, flags=re.M)[1:]:
        line, _, shown = re.sub(r"\\\n", "", part).partition("\n")
        yield Command(line=line, shown=shown)


def is_as_shown(printed: str, shown: str) -> bool:
    """Whether `printed` is `shown`, in which a line of three dots stands for any lines."""
    lines = [re.escape(line.rstrip()) + "\n" if line != "..." else r"(?:.*\n)*?" for line in shown.splitlines()]
    return re.fullmatch("".join(lines), "".join(f"{line.rstrip()}\n" for line in printed.splitlines())) is not None


def test_what_is_shown_may_leave_lines_out_and_nothing_else():
    assert is_as_shown("a\nb\nc\n", "a\n...\nc\n")
    assert is_as_shown("a  \n", "a\n")
    assert is_as_shown("a\n", "a\n...\n")
    assert not is_as_shown("a\nb\nc\n", "a\nc\n")
    assert not is_as_shown("a\nb\n", "a\n")
    assert not is_as_shown("a\n", "...\nb\n")


@pytest.fixture(scope="module")
def demo(tmp_path_factory) -> Path:
    directory = tmp_path_factory.mktemp("docs") / "demo"
    write_demo(directory)
    return directory


@pytest.fixture
def shell(tmp_path):
    """Runs a line as somebody would who has thdprof installed; a line that needs no shell, without one."""
    binaries = tmp_path / "bin"
    binaries.mkdir()
    (binaries / "thdprof").write_text(f'#!/bin/sh\nexec "{sys.executable}" -m thdprof "$@"\n')
    (binaries / "thdprof").chmod(0o755)
    environment = {**os.environ, "COLUMNS": "120", "NO_COLOR": "1", "TERM": "dumb", "LC_ALL": "C.UTF-8"}
    environment["PATH"] = f"{binaries}:{os.environ['PATH']}"
    environment["PYTHONPATH"] = f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"
    environment["CUDA_VISIBLE_DEVICES"] = ""  # modelled times are then of the stated range of hosts, on any machine

    def run(line: str, where: Path) -> subprocess.CompletedProcess:
        if re.fullmatch(r"thdprof [\w ./:=,%'\"-]+\n?", line):
            return run_in_process(*shlex.split(line)[1:], cwd=where, env=environment)
        return subprocess.run(
            ["bash", "-c", line], cwd=where, env=environment, capture_output=True, text=True, timeout=120
        )

    return run


def expected_code(fence: Fence) -> int:
    found = re.fullmatch(r"exit code (\d)", fence.title)
    return int(found[1]) if found else 0


def run_command(command: Command, code: int, where: Path, shell) -> None:
    done = shell(command.line, where)
    assert done.returncode == code, (command.line, done.stderr)
    printed = done.stdout + (done.stderr if code else "")
    if command.shown:
        assert is_as_shown(printed, command.shown), f"{command.line}\n{printed}\nis not\n{command.shown}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_pages_do_what_they_show(page, demo, tmp_path, shell, monkeypatch):
    blocks = [fence for fence in fences(page) if fence.kind in RUN]
    where = tmp_path / "page"
    where.mkdir()
    if not any("thdprof demo demo" in fence.text for fence in blocks):
        shutil.copytree(demo, where / "demo")
    monkeypatch.chdir(where)
    names: dict[str, object] = {}
    printed = None
    for fence in blocks:
        if fence.kind == "output":
            assert printed is not None
            assert is_as_shown(printed, fence.text), f"{printed}\nis not\n{fence.text}"
        elif fence.kind == "python" and fence.title == "needs a GPU":
            check_python(fence.text)
        elif fence.kind == "python":
            if "torch" in fence.text:
                pytest.importorskip("torch")
            out = io.StringIO()
            with contextlib.redirect_stdout(out):
                exec(compile(fence.text, str(page), "exec"), names)
            printed = out.getvalue()
        elif "." in fence.title:
            (where / fence.title).write_text(fence.text)
            assert fence.kind != "yaml" or isinstance(yaml.safe_load(fence.text), dict)
        elif fence.kind == "bash":
            run_command(Command(line=fence.text, shown=""), expected_code(fence), where, shell)
        else:
            assert fence.kind == "console", fence
            found = list(commands(fence.text))
            assert found, fence
            for command in found:
                run_command(command, expected_code(fence), where, shell)


def test_readme_commands_on_the_demo_data_run(tmp_path, shell):
    for fence in fences(README):
        if "." in fence.title:
            (tmp_path / fence.title).write_text(fence.text)
    lines = [line.split("#")[0] for line in plain_commands(README)]
    wanted = [line for line in lines if re.match(r"thdprof (demo|analyze) ", line)]
    assert len(wanted) >= 3
    for line in wanted:
        run_command(Command(line=line, shown=""), 0, tmp_path, shell)


# --- Python that needs a GPU ----------------------------------------------------------------------------------------


def check_python(text: str) -> None:
    """Names that are imported exist, and what is called of them takes the keywords that are given."""
    tree = ast.parse(text)
    found: dict[str, object] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            module = pytest.importorskip(node.module) if "thdprof" not in node.module else import_ours(node.module)
            found |= {name.asname or name.name: getattr(module, name.name) for name in node.names}
        elif isinstance(node, ast.Import):
            for name in node.names:
                import_ours(name.name)
                found[name.name.split(".")[0]] = importlib.import_module(name.name.split(".")[0])
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            resolved(node, found)
        if isinstance(node, ast.Call):
            called = resolved(node.func, found)
            if callable(called):
                accepts(called, [keyword.arg for keyword in node.keywords if keyword.arg])


def import_ours(name: str) -> types.ModuleType:
    if name.startswith("thdprof.runtime"):
        pytest.importorskip("torch")
    if name.startswith("thdprof.runtime.megatron"):
        pytest.importorskip("megatron.core")
    if name.endswith("trainers.bridge"):
        importlib.import_module("support.bridge_referee")  # leads to Bridge's files where its dependencies are missing
    return importlib.import_module(name)


def resolved(node: ast.expr, found: dict[str, object]) -> object:
    """What an expression names, where it begins at an import; else None."""
    if isinstance(node, ast.Name):
        return found.get(node.id)
    if isinstance(node, ast.Attribute):
        owner = resolved(node.value, found)
        return getattr(owner, node.attr) if isinstance(owner, types.ModuleType) else None
    return None


def accepts(called, keywords: list[str]) -> None:
    parameters = inspect.signature(called).parameters
    if any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        return
    assert set(keywords) <= set(parameters), (called, keywords)


def test_python_of_the_readme_uses_names_that_exist():
    blocks = [fence for fence in fences(README) if fence.kind == "python"]
    assert blocks
    for fence in blocks:
        check_python(fence.text)


def test_python_with_wrong_names_is_found():
    with pytest.raises(AttributeError):
        check_python("from thdprof.analyze import no_such_name")
    with pytest.raises(AttributeError):
        check_python("import thdprof\nthdprof.no_such_name()")
    with pytest.raises(AssertionError):
        check_python("from thdprof import load_plan\nload_plan('plan.yaml', no_such_keyword=1)")


# --- commands that are only parsed ----------------------------------------------------------------------------------


def plain_commands(page: Path, kinds=("",)) -> list[str]:
    """The lines of blocks that are no console, with lines that are continued joined."""
    texts = [fence.text for fence in fences(page) if fence.kind in kinds and not fence.text.startswith("$")]
    lines = [line.strip() for text in texts for line in re.sub(r"\\\n", " ", text).splitlines()]
    return [line for line in lines if line and not line.startswith("#")]


PARSED_LINES = [
    *((page.name, line) for page in PAGES for line in plain_commands(page, tuple(PARSED))),
    *(("README.md", line) for line in plain_commands(README)),
]


def script(path: str):
    """A script as a module."""
    pytest.importorskip("torch")
    name = "documented_" + Path(path).stem
    spec = importlib.util.spec_from_file_location(name, ROOT / path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def check_command(line: str) -> None:
    """A command names a command, script, target or extra that there is, with options that it has."""
    words = shlex.split(line, comments=True)
    words = words[: words.index("|")] if "|" in words else words
    match words:
        case ["thdprof", name, *rest]:
            cli_reference.commands()[name].make_context(f"thdprof {name}", rest)
        case ["make", target]:
            assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(), re.M), target
        case ["pip", "install", what]:
            extras = re.findall(r"\w+", what.removeprefix("."))
            declared = (ROOT / "pyproject.toml").read_text()
            assert all(re.search(rf"^{extra} = \[", declared, re.M) for extra in extras), extras
        case ["torchrun", "--nproc-per-node", count, "-m", "thdprof.run", *rest]:
            assert int(count) >= 1
            check_run_by_a_plan(rest)
        case ["torchrun", "--nproc-per-node", count, path, *rest]:
            assert int(count) >= 1
            script(path).arguments(rest)
        case ["python", path, *rest]:
            script(path).arguments(rest)
        case ["git", "clone", *_]:
            assert "core_v0.19.0" in words
        case ["bash", name]:
            assert name in [fence.title for fence in fences(README)]
        case _:
            pytest.fail(f"nobody knows how to check: {line}")


def check_run_by_a_plan(words: list[str]) -> None:
    """`thdprof.run` has the options in front of a script of Megatron-LM's, and Megatron has those behind it."""
    given = run.parser().parse_args(words)
    assert given.script.name in ("pretrain_gpt.py", "pretrain_hybrid.py"), given.script
    unknown = megatron_parser().parse_known_args([word for word in given.arguments if word != "..."])[1]
    assert not unknown


@functools.cache
def megatron_parser() -> argparse.ArgumentParser:
    """Megatron-LM's own parser, which takes seconds to make."""
    arguments = pytest.importorskip("megatron.training.arguments")
    return arguments.add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False))


def test_there_are_commands_to_parse():
    assert len([line for name, line in PARSED_LINES if name != "README.md"]) >= 8
    assert len([line for name, line in PARSED_LINES if name == "README.md"]) >= 8


@pytest.mark.parametrize(("page", "line"), PARSED_LINES)
def test_commands_that_are_not_run_have_options_that_exist(page, line):
    check_command(line)


@pytest.mark.parametrize(
    "line",
    [
        "thdprof analyze data --no-such-option 1",
        "thdprof no-such-command",
        "make no-such-target",
        "pip install .[nosuch]",
        "torchrun --nproc-per-node 1 examples/train_megatron_core.py --plan p.yaml --no-such-option",
        "torchrun --nproc-per-node 1 -m thdprof.run --no-such-option pretrain_gpt.py",
        "torchrun --nproc-per-node 1 -m thdprof.run --plan p.yaml pretrain_gpt.py ... --no-such-option",
        "torchrun --nproc-per-node 1 -m thdprof.run --plan p.yaml no_such_script.py ...",
        "bash no_such_script.sh",
        "rm everything",
    ],
)
def test_commands_with_wrong_options_are_found(line, capsys):
    with pytest.raises((Exception, SystemExit, pytest.fail.Exception)):
        check_command(line)


def test_argparse_is_what_scripts_use():
    assert isinstance(script("examples/train_megatron_core.py").arguments(["--plan", "p.yaml"]), argparse.Namespace)


# --- numbers ---------------------------------------------------------------------------------------------------------

_NUMBER = re.compile(r"(?<![\w.,-])\d[\d,]*(?:\.\d+)?(?![\w]|\.\d)")


def numbers_of(text: str) -> set[str]:
    return {number.rstrip(",") for number in _NUMBER.findall(text.replace("x ", " "))}


def unknown_numbers(paragraph: str) -> set[str]:
    """Numbers of a paragraph that are in none of the results that it links to."""
    cited = re.findall(r"\]\((?:\.\./)?(benchmarks/results/[\w-]+\.md)", paragraph)
    known = numbers_of("".join((ROOT / name).read_text() for name in cited))
    return numbers_of(re.sub(r"\]\([^)]*\)", "]", paragraph)) - known


def paragraphs(text: str) -> list[str]:
    """Paragraphs and list items, without what is fenced."""
    text = re.sub(r"^```.*?^```$", "", text, flags=re.M | re.S)
    return re.split(r"\n\s*\n|\n(?=- )", text)


CITATIONS = [
    (page.name, paragraph)
    for page in [README, *PAGES]
    if page.name != "evidence.md"  # made by tools/evidence.py
    for paragraph in paragraphs(written(page))
    if "benchmarks/results/" in paragraph
]


def test_results_are_cited():
    assert len(CITATIONS) >= 8


@pytest.mark.parametrize(("page", "paragraph"), CITATIONS)
def test_measured_numbers_stand_in_the_results_that_are_cited(page, paragraph):
    assert unknown_numbers(paragraph) == set()


def test_no_measured_number_stands_without_its_source():
    measured = re.compile(r"\d (?:ms|MiB|GiB|times)\b")
    found = [part for page in [README, *PAGES] for part in paragraphs(written(page)) if measured.search(part)]
    assert len(found) >= 5
    assert [part for part in found if "benchmarks/results/" not in part] == []


def test_the_evidence_is_that_of_the_results():
    done = subprocess.run([sys.executable, ROOT / "tools" / "evidence.py", "--check"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_readme_and_guides_stay_short():
    assert len(README.read_text().splitlines()) <= 150
    assert len((DOCS / "megatron.md").read_bytes()) <= 25_000
    for guide in ("trl", "megatron", "megatron-bridge", "megatron-core", "torch", "start"):
        assert len((DOCS / f"{guide}.md").read_text().split()) <= 1_250, guide  # five minutes


def test_every_result_has_its_place_in_the_site():
    listed = re.findall(r": (results/[\w-]+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.M)
    assert sorted(listed) == sorted(f"results/{path.name}" for path in (ROOT / "benchmarks/results").glob("*.md"))


def test_the_files_that_results_name_are_there_or_the_page_says_which_commit_has_them():
    checked = 0
    for page in sorted((ROOT / "benchmarks" / "results").glob("*.md")):
        text = page.read_text()
        named = set(re.findall(r"(?<![\w/-])(?:benchmarks|tests|examples)/[\w/]+\.py", text))
        gone = {name for name in named if not (ROOT / name).exists()}
        checked += len(named)
        assert not gone or re.search(r"[Cc]ommit \w*\d\w*", text), (page, gone)
    assert checked >= 20


def test_numbers_that_are_not_in_the_results_are_found():
    link = "[runtime](../benchmarks/results/runtime.md)"
    assert unknown_numbers(f"13.88 ms with buckets of 64, 128 and 358 {link}") == set()
    assert unknown_numbers(f"13.89 ms with buckets of 64, 128 and 1,358 {link}") == {"13.89", "1,358"}


# --- references -----------------------------------------------------------------------------------------------------


def test_the_plan_reference_has_every_field_of_every_part():
    from thdprof import plan

    text = plan_reference.reference()
    parts = [
        value
        for value in vars(plan).values()
        if isinstance(value, type) and issubclass(value, BaseModel) and value.__module__.startswith(plan.__name__)
    ]
    parts = [part for part in parts if part.model_fields]
    assert len(parts) >= 10
    sections = {section.split("\n")[2]: section for section in re.split(r"^## ", text, flags=re.M)[1:]}
    for part in parts:
        section = sections[part.model_json_schema()["description"].split("\n")[0]]
        documented = re.findall(r"^\| `(\w+)` \| (.+?) \| (.+?) \| (\S.*?) \|$", section, re.M)
        assert [row[0] for row in documented] == [field.alias or name for name, field in part.model_fields.items()]


def test_a_field_without_a_description_is_not_let_pass():
    class Bare(BaseModel):
        """A part."""

        model_config = ConfigDict(use_attribute_docstrings=True)
        said: int = 1
        """What it is."""
        unsaid: int = 2

    with pytest.raises(ValueError, match=r"Bare\.unsaid"):
        plan_reference.reference(Bare)


def test_types_of_the_plan_reference():
    text = plan_reference.reference()
    row = "| `max_seqs` | whole number, at least 1 | required | Most documents of a micro-batch, a dummy tail included;"
    assert row in text
    assert "| `cp_size` | whole number, at least 1 | `1` |" in text
    assert "| `impl` | one of `none`, `module`, `chunk`, `local`, `transformer_engine` | `module` |" in text
    places = "#graphsbuckets-predictionsbestbuckets-predictionsbest_without_graphsbuckets"
    assert f"| `buckets` | list ([mapping]({places})) | required |" in text
    assert "| `share` | number, 0 to 1 | required |" in text
    assert "[mapping](#microbatchesn_seqs-microbatchesmax_seqlen)" in text


def test_the_command_reference_has_every_option():
    text = cli_reference.reference()
    assert len(cli_reference.commands()) >= 5
    for name, command in cli_reference.commands().items():
        section = text.split(f"## `{name}`\n")[1].split("\n## ")[0]
        options = [option for param in command.params for option in param.opts if option.startswith("--")]
        assert options
        for option in options:
            assert re.search(rf"^\| `[^`]*{option}\b[^`]*` \| \w.* \|$", section, re.M), (name, option, "says nothing")


def test_refused_settings_are_those_of_install():
    fields, cases = settings_reference.reference().split("| case | because | instead |")
    rows = re.findall(r"^\| `(\w+)` \| ([^|]+) \|", fields, re.M)
    assert rows == [(limit.name, limit.graphs) for limit in LIMITS if limit.graphs is not None]
    kinds = {
        "all",
        "all, with FP8 or FP4",
        "`local`",
        "`chunk`, `local`",
        "`chunk`, `transformer_engine`",
        "`transformer_engine`, with FP8 or FP4",
        "whole layers of dropless experts",
        "whole layers of dropless experts that ranks share (`graphs.expert_room`)",
    }
    assert {graphs for _, graphs in rows} == {*kinds, "dynamic context parallelism"}
    names = re.findall(r"^\| ([^|]+) \| [^|]+ \| [^|]+ \|$", cases, re.M)
    assert names == [limit.name for limit in LIMITS if limit.graphs is None]


def test_references_need_neither_torch_nor_megatron():
    blocked = (
        "import runpy, sys\n"
        "sys.modules |= dict.fromkeys(('torch', 'megatron', 'megatron.core', 'transformer_engine', 'mkdocs'))\n"
        "sys.argv[1:] = ['--check']\n"
        "runpy.run_module('references', run_name='__main__')\n"
    )
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{DOCS / 'tools'}"}
    done = subprocess.run([sys.executable, "-c", blocked], env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_generated_parts_are_current(page):
    text = page.read_text()
    assert references.fill_parts(text) == text, f"docs/{page.name} is old: run `make references`"


def test_every_generator_has_its_place():
    parts = [part[2] for page in PAGES for part in references.PART.finditer(page.read_text())]
    assert {*references.GENERATED} <= {*parts}
    assert "".join(page.read_text() for page in PAGES).count("<!-- generated: ") == len(parts)


def test_a_generated_part_that_is_old_is_found():
    text = "above\n<!-- generated: thdprof.errors.* -->\nold\n<!-- end -->\nbelow\n"
    made = references.fill_parts(text)
    assert made != text
    assert "### `thdprof.errors.GateError`\n\nA gate (`check`, `compare`) did not hold." in made
    assert made.endswith("<!-- end -->\nbelow\n")
    assert references.fill_parts(made) == made


@pytest.mark.parametrize("package", ["thdprof", "thdprof.analyze", "thdprof.runtime", "thdprof.runtime.megatron"])
def test_the_python_reference_has_every_public_name(package):
    text = (DOCS / "reference-python.md").read_text()
    if "runtime" in package:
        pytest.importorskip("torch")
    if "megatron" in package:
        pytest.importorskip("megatron.core")
    for name in importlib.import_module(package).__all__:
        assert name.startswith("__") or re.search(rf"^### `thdprof\.([\w.]+\.)?{name}`$", text, re.M), name


def test_the_python_reference_shows_signatures_arguments_fields_and_errors():
    text = python_reference.reference("thdprof.load_plan thdprof.Plan(save) thdprof.runtime.Bucket")
    assert "```text\nload_plan(path: Path | str) -> Plan\n```" in text
    assert "```text\nsave(path: Path | str, *, force: bool = False)\n```" in text
    assert "Raises:\n\n- `DataError`: the file exists and `force` is false, or it cannot be written." in text
    assert "- `cp_size: int = 1`: Context-parallel size: the communication that was captured." in text
    assert "to_yaml" not in text
    with pytest.raises(ValueError, match=r"thdprof\.runtime has no Nothing"):
        python_reference.reference("thdprof.runtime.Nothing")


def test_formats_targets_and_packers_are_those_there_are():
    from thdprof.training import FORMATS, definitions
    from thdprof.training.systems import EXPORTS

    text = (DOCS / "formats.md").read_text()
    assert re.findall(r"^\| `([a-z-]+)` \|", text.split("## What is exact")[0], re.M) == [*FORMATS]
    targets = (DOCS / "reference-cli.md").read_text().split("## Export targets")[1]
    assert re.findall(r"^\| `([a-z-]+)` \|", targets, re.M) == [*EXPORTS]
    table = text.split("| packer | packs like |")[1].split("```")[0]
    assert set(re.findall(r"`(\w+)`", "".join(row.split("|")[1] for row in table.splitlines() if row))) == {
        *definitions()["packer"].choices,
        *definitions()["packer"].setting.aliases,
    }


def anchors(page: Path) -> list[str]:
    """Anchors of a page's sections where the code is hosted: every blank is a hyphen."""
    text = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.M | re.S)
    titles = [re.sub(r"\]\([^)]*\)", "", title).strip().lower() for title in re.findall(r"^#+ (.*)$", text, re.M)]
    return [re.sub(r"[^\w -]", "", title).replace(" ", "-") for title in titles]


def broken_links(page: Path, text: str) -> Iterator[str]:
    """Links of `page` whose file or section there is not, in the repository or on the site."""
    for link in re.findall(r"\]\(([^)\s]+)\)", re.sub(r"^```.*?^```$", "", text, flags=re.M | re.S)):
        if link.startswith("https://"):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        on_site = page.parent != DOCS or target.parent in (DOCS, DOCS / "images", ROOT / "benchmarks" / "results")
        there = target.exists() and (not anchor or anchors(target).count(anchor) == 1)
        if not there or not on_site or "--" in anchor:  # the site makes one hyphen of several
            yield link


LINKING = [
    README,
    ROOT / "CONTRIBUTING.md",
    ROOT / "CHANGELOG.md",
    *PAGES,
    *sorted((ROOT / "benchmarks/results").glob("*.md")),
]


def test_links_lead_to_files_and_sections_that_there_are():
    found = {str(page.relative_to(ROOT)): list(broken_links(page, page.read_text())) for page in LINKING}
    assert {name: links for name, links in found.items() if links} == {}
    assert sum(page.read_text().count("](") for page in LINKING) >= 200


@pytest.mark.parametrize("link", ["nowhere.md", "plan.md#nowhere", "#nowhere", "../Makefile", "/docs/plan.md"])
def test_links_that_lead_nowhere_are_found(link):
    assert [*broken_links(DOCS / "index.md", f"[words]({link})")] == [link]


def test_pages_and_results_that_the_code_names_are_there():
    sources = [path.read_text() for path in sorted((ROOT / "thdprof").rglob("*.py"))]
    named = {name for text in sources for name in re.findall(r"\b(?:docs|benchmarks)/[\w/-]+\.\w+|README\.md", text)}
    assert len(named) >= 5
    assert [name for name in named if not (ROOT / name).exists()] == []


# --- troubleshooting ------------------------------------------------------------------------------------------------


def sections() -> dict[str, str]:
    text = (DOCS / "troubleshooting.md").read_text()
    return dict(re.findall(r"^## `?(\w[\w ]*)`?\n(.*?)(?=^## |\Z)", text, re.M | re.S))


def test_every_reason_has_a_section():
    titles = re.findall(r"^## `(\w+)`$", (DOCS / "troubleshooting.md").read_text(), re.M)
    assert titles == [*FallbackReason]


def test_reasons_are_logged_as_shown():
    pytest.importorskip("torch")
    from thdprof.dispatch import Bucket, Shape, advice

    buckets = [Bucket(64, 4096, 4096), Bucket(113, 4096, 4096)]
    shapes = {
        FallbackReason.too_many_seqs: Shape(130, 900, 4096),
        FallbackReason.document_too_long: Shape(40, 5000, 4096),
        FallbackReason.token_count_differs: Shape(40, 900, 4000),
        FallbackReason.cp_size_not_captured: Shape(40, 900, 4096, 2),
    }
    for reason in FallbackReason:
        line = advice(reason, shapes.get(reason, Shape(40, 900, 4096)), buckets)
        assert f"```text\n{line}\n```" in sections()[reason], line


def test_the_settings_error_is_as_shown(demo):
    pytest.importorskip("megatron.core")
    from thdprof.analyze import analyze_dataset, make_plan
    from thdprof.runtime.megatron.refusals import Facts, SettingsError, check

    plan = make_plan(analyze_dataset(demo / "megatron", seq_length=4096, global_batch_size=8))
    config = types.SimpleNamespace(
        pipeline_model_parallel_size=2,
        virtual_pipeline_model_parallel_size=None,
        context_parallel_size=1,
        tensor_model_parallel_size=1,
        qk_clip=True,
        apply_rope_fusion=False,
        cuda_graph_impl="none",
    )
    with pytest.raises(SettingsError) as told:
        check(config, plan, Facts(num_chunks=1, graph_safe_rng=False), {})
    assert f"```text\n{told.value}\n```" in sections()["SettingsError"], str(told.value)


def test_the_version_error_and_the_versions_are_as_shown(monkeypatch, tmp_path):
    pytest.importorskip("megatron.core")
    from thdprof.runtime.megatron import versions

    monkeypatch.delenv(versions.OVERRIDE, raising=False)
    (tmp_path / "transformer").mkdir()
    (tmp_path / "transformer" / "cuda_graphs.py").write_text("def _set_capture_start(): ...")
    first, _, _ = versions.MEGATRON.names.strip().partition("\n")
    package = replace(versions.MEGATRON, tried={}, names=first)
    found = versions.refusals(package, tmp_path)
    monkeypatch.setattr(versions, "refusals", lambda package: found)
    with pytest.raises(versions.VersionError) as told:
        versions.check(package, find=lambda names: {"megatron-core": "0.21.0"})
    assert f"```text\n{told.value}\n```" in sections()["VersionError"], str(told.value)
    shown = re.findall(r"`([\d.]+)`", (DOCS / "megatron.md").read_text().split("## Versions")[1])
    packages = (versions.MEGATRON, versions.TRANSFORMER_ENGINE)
    assert shown == [*(package.oldest for package in packages), *(package.newest_run for package in packages)]
