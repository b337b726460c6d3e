"""The README's own commands print what it says."""

from __future__ import annotations

import re
import shlex

from support.paths import ROOT


def test_commands_print_what_the_readme_shows(thdprof, tmp_path):
    assert thdprof("demo", "demo", cwd=tmp_path).returncode == 0
    blocks = re.findall(r"^```\n\$ thdprof ([^\n]*)\n(.*?)^```$", (ROOT / "README.md").read_text(), re.M | re.S)
    assert len(blocks) == 2
    for command, shown in blocks:
        done = thdprof(*shlex.split(command), cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        printed = "\n".join(line.rstrip() for line in done.stdout.splitlines())
        elided = shown.strip().removeprefix("...\n")
        assert elided in printed, command


def test_its_formats_and_targets_are_those_there_are():
    from thdprof.analyze.export import TARGETS
    from thdprof.analyze.sources import FORMATS

    text = (ROOT / "README.md").read_text().split("## At train time")[0]
    rows = re.findall(r"^\| `([a-z-]+)` \|", text, re.M)
    assert rows == [*FORMATS, *TARGETS]
