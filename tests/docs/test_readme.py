"""The README's own commands print what it says."""

from __future__ import annotations

import re
import shlex

from support.paths import ROOT


def test_commands_print_what_the_readme_shows(thdprof, tmp_path, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")  # modelled times are of the stated range of hosts, on any machine
    text = (ROOT / "README.md").read_text()
    assert thdprof("demo", "demo", cwd=tmp_path).returncode == 0
    for name, content in re.findall(r'^```\w+ title="([^"]+)"\n(.*?)^```$', text, re.M | re.S):
        (tmp_path / name).write_text(content)
    blocks = re.findall(r"^```\n\$ thdprof ([^\n]*)\n(.*?)^```$", text, re.M | re.S)
    assert blocks
    for command, shown in blocks:
        done = thdprof(*shlex.split(command), cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        printed = "\n".join(line.rstrip() for line in done.stdout.splitlines()) + "\n"
        at = 0
        for part in re.split(r"^\.\.\.\n", shown, flags=re.M):  # three dots stand for lines that are left out
            at = printed.find(part, at)
            assert at >= 0, (command, part, printed)
            at += len(part)
