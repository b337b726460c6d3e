"""The interpreter of benchmarks that forks a process whose imports are done: it does what `python` does."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest
from support.command import load_script
from support.paths import ROOT

PYTHON = ROOT / "benchmarks" / "forked" / "python"


@pytest.fixture(scope="module")
def forked(tmp_path_factory):
    """The environment of clients of a server that has imported one module."""
    folder = tmp_path_factory.mktemp("forked")
    environment = {**os.environ, "FORKED_PYTHON": str(folder / "socket"), "MARK": "server"}
    command = [sys.executable, str(ROOT / "benchmarks" / "forked" / "server.py"), "--without", "wave", "--modules"]
    with subprocess.Popen(
        [*command, "colorsys", "nowhere"], stdout=subprocess.PIPE, text=True, env=environment
    ) as server:
        assert server.stdout is not None
        assert server.stdout.readline().startswith("without nowhere: ModuleNotFoundError")
        assert server.stdout.readline().startswith("ready")
        yield {**environment, "MARK": "client", "PYTHONPATH": str(folder)}
        server.kill()


def run(forked, *arguments, **options):
    return subprocess.run(
        [PYTHON, *arguments], capture_output=True, text=True, env=forked, timeout=60, check=False, **options
    )


def test_text_runs_in_its_callers_surroundings(forked, tmp_path):
    code = "import os, sys; print(os.getcwd(), os.environ['MARK'], sys.argv, sys.executable, 'colorsys' in sys.modules)"
    done = run(forked, "-W", "ignore", "-c", code, "one", "-m", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == f"{tmp_path} client ['-c', 'one', '-m'] {PYTHON} True\n"


def test_a_script_finds_its_own_folder_and_pythonpath(forked, tmp_path):
    (tmp_path / "beside.py").write_text("WORD = 'beside'\n")
    (tmp_path / "program.py").write_text(
        "import sys, beside\nassert __name__ == '__main__'\nprint(beside.WORD, sys.argv, sys.path[1])\nsys.exit(7)\n"
    )
    done = run(forked, tmp_path / "program.py", "--flag")
    assert done.returncode == 7
    assert done.stdout == f"beside ['{tmp_path / 'program.py'}', '--flag'] {forked['PYTHONPATH']}\n"


def test_a_module_runs_and_reads_what_it_is_given(forked):
    done = run(forked, "-m", "json.tool", "--compact", input='{"a":  1}')
    assert (done.returncode, done.stdout) == (0, '{"a":1}\n')


def test_an_error_is_an_error(forked):
    done = run(forked, "-c", "raise ValueError('of the program')")
    assert done.returncode == 1
    assert "ValueError: of the program" in done.stderr


def test_a_module_that_is_left_out_cannot_be_imported(forked):
    assert "ModuleNotFoundError" in run(forked, "-c", "import wave").stderr


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_signal_ends_the_forked_process(forked, tmp_path, number):
    code = f"import os, time; open({str(tmp_path / 'pid')!r}, 'w').write(str(os.getpid())); time.sleep(60)"
    with subprocess.Popen([PYTHON, "-c", code], env=forked) as client:
        pid = _when(lambda: (tmp_path / "pid").exists() and (tmp_path / "pid").read_text())
        client.send_signal(number)
        assert client.wait(20) == -number
    _when(lambda: not os.path.exists(f"/proc/{pid}"))


def test_without_a_server_nothing_runs(forked, tmp_path):
    done = run({**forked, "FORKED_PYTHON": str(tmp_path / "none")}, "-c", "print(1)")
    assert done.returncode == 1
    assert "no server to fork from" in done.stderr


def test_while_modules_are_imported_they_are_told_of_the_gpu_and_do_not_initialize_it(monkeypatch):
    torch = pytest.importorskip("torch")
    server = load_script("benchmarks/forked/server.py", "forked_server")
    properties = dict.fromkeys(("name", "total_memory", "multi_processor_count"), 1) | {"major": 9, "minor": 0}
    monkeypatch.setattr(server, "_seen_gpu", lambda: {"count": 2, "properties": properties})
    own = torch.cuda.is_available
    with server.gpu_described():
        kept = torch.cuda.is_available  # as a module keeps it that imports it by name
        assert kept()
        assert torch.cuda.device_count() == 2
        assert torch.cuda.get_device_capability(0) == (9, 0)
        assert torch.cuda.get_device_properties(0).multi_processor_count == 1
        with pytest.raises(RuntimeError, match="initializes CUDA as it is imported"):
            torch.cuda._lazy_init()
    assert torch.cuda.is_available is own
    assert kept() == own()


def _when(holds):
    for _ in range(1000):
        if held := holds():
            return held
        time.sleep(0.02)
    raise AssertionError("it did not come to hold")
