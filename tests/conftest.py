import contextlib
import gc
import os
import signal
import zlib

import pytest

from kit import kinds, patience, thorough

# torch looks up 127.0.0.1 backwards on every connection; where the resolver drops a packet that is five seconds each.
os.environ.setdefault("RES_OPTIONS", "timeout:1")
# As a user's process has it: torch copies with several threads. Those that wait do not spin, the machine is small.
# Simulated histories and the jobs of fault tests set one thread themselves.
os.environ.setdefault("OMP_NUM_THREADS", "2")
# numpy's own would start at its import: from a process with threads no warm one can be forked (kit/warm.py).
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
# Nor from one with a thread of pyarrow, which transformers imports.
os.environ.setdefault("JE_ARROW_MALLOC_CONF", "background_thread:false")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
# Every test module imports them, and so would every rank.
os.environ.setdefault("RANKS_PRELOAD", "pytest,hypothesis")
# What the tests start runs as with python -O; pytest itself does not, for there its own assertions would be gone.
if os.environ.get("RANKS_OPTIMIZED"):
    os.environ["PYTHONOPTIMIZE"] = "1"
# A shell's background jobs, and what they start, ignore Ctrl-C: here programs are sent it, and must hear it.
signal.signal(signal.SIGINT, signal.default_int_handler)

_LAST_FILE = pytest.StashKey()


def pytest_addoption(parser):
    parser.addoption("--all", action="store_true", help="also the tests marked thorough, and of the others all rounds")
    parser.addoption(
        "--quick",
        action="store_true",
        help="none that starts servers, hosts, ranks or a framework, but for what is marked quick",
    )
    parser.addoption("--third", action="store_true", help="a third of them, always the same: see make test-versions")


def pytest_configure(config):
    if config.getoption("--all"):
        thorough.turn_on()  # before any test module is imported
    patience.factor()  # before there are other processes that it would measure


def pytest_report_header(config):
    return f"limits of waiting are multiplied by {patience.factor():.2f}"


def be_patient(items):
    """What pytest-timeout allows for a test takes longer on a busy machine, too."""
    for item in items:
        mark = item.get_closest_marker("timeout")
        usual = mark.args[0] if mark else float(item.config.getini("timeout"))
        item.add_marker(pytest.mark.timeout(patience.scaled(usual)), append=False)


def pytest_collection_modifyitems(config, items):
    for item in items:
        for name in sorted(kinds.marks_of_item(item)):  # by the limits of time as they are written
            item.add_marker(name)
    be_patient(items)
    if config.getoption("--quick"):
        _leave_out(config, items, [item for item in items if not kinds.is_quick(item)])
    if config.getoption("--third"):
        _leave_out(config, items, [item for item in items if zlib.crc32(item.nodeid.encode()) % 3])
    if thorough.THOROUGH:
        return
    _leave_out(config, items, [item for item in items if item.get_closest_marker("thorough")])


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item):
    """Each full collection would look at all that the imports have made, and a Trainer makes one as it begins."""
    before = item.config.stash.get(_LAST_FILE, None)
    item.config.stash[_LAST_FILE] = item.path
    if before != item.path and not gc.get_freeze_count():  # some tests thaw it
        gc.collect()
        gc.freeze()


def _leave_out(config, items, left_out):
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        gone = set(map(id, left_out))
        items[:] = [item for item in items if id(item) not in gone]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item):
    """A quick test that starts what a quick test must not, fails."""
    allowed = not item.config.getoption("--quick") or kinds.is_promise(item)
    with contextlib.nullcontext() if allowed else kinds.starts_nothing():
        return (yield)


@pytest.fixture(scope="session")
def object_server(tmp_path_factory):
    """A server that speaks S3, one for each process of the tests; the quickest to start."""
    from kit import object_servers

    if why := object_servers.missing("ministack"):
        pytest.skip(why)
    with object_servers.start("ministack", tmp_path_factory.mktemp("ministack")) as server:
        yield server


@pytest.fixture
def bucket(object_server, monkeypatch):
    """A new bucket of it, to which the environment leads."""
    made = object_server.new_bucket()
    for name, value in made.environment().items():
        monkeypatch.setenv(name, value)
    return made
