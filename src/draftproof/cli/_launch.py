"""Commands that run in several processes: started by torch.distributed's launcher, watched, and ended together."""

from __future__ import annotations

import logging
import os
import signal
import sys
from tempfile import TemporaryDirectory

import typer

from draftproof.backends.hf import tensor_parallel as parallel
from draftproof.backends.loading.by_name import take_part
from draftproof.cli._quiet import quiet_libraries
from draftproof.errors import UserError
from draftproof.native.cores import usable_cores
from draftproof.native.threads import NUMBER

_DRAIN = 60  # seconds until processes that were asked to end are killed


def divide(processes: int) -> None:
    """Go on in so many processes; returns in process 0 only.

    A process that was not started by a launcher starts them all with its own arguments, waits, and exits as process 0
    does. Processes other than 0 follow that one, and exit.

    Raises:
        UserError: another number of processes was started, or one of them ended before the others.
    """
    if processes < 2:
        raise UserError(f"--tensor-parallel: expected 1 (one process) or more, got {processes}")
    if parallel.is_launched():
        with quiet_libraries():
            take_part(processes)
        return
    raise typer.Exit(_launched(processes, sys.argv[1:]))


def _launched(processes: int, arguments: list[str]) -> int:
    """Run the command in so many processes of this machine; returns the exit code of process 0."""
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    os.environ.setdefault(NUMBER, str(max(usable_cores() // processes, 1)))
    for name in list(logging.root.manager.loggerDict):
        if name.startswith("torch.distributed"):
            logging.getLogger(name).setLevel(logging.CRITICAL)  # they tell of every signal that is sent
    with TemporaryDirectory() as logs:
        config = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=processes,
            run_id="draftproof",
            rdzv_backend="c10d",
            rdzv_endpoint="localhost:0",
            local_addr="localhost",
            max_restarts=0,
            logs_specs=DefaultLogsSpecs(log_dir=logs),
            shutdown_timeout=_DRAIN,
        )
        try:
            elastic_launch(config, sys.executable)("-m", "draftproof", *arguments)
        except ChildFailedError as error:
            return _explained({rank: failure.exitcode for rank, failure in error.failures.items()}, processes)
        except SignalException as error:
            return 128 + error.sigval
    return 0


def _explained(codes: dict[int, int], processes: int) -> int:
    """The exit code after a failure of processes, by rank; negative ones are signals. Process 0 has printed its own."""
    asked = {-signal.SIGTERM, -signal.SIGINT}  # by the launcher, because of the first that failed
    killed = {rank: code for rank, code in codes.items() if code < 0 and code not in asked}
    if not killed and codes.get(0, 0) > 0:
        return codes[0]
    rank, code = next(iter((killed or codes).items()))
    how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
    raise UserError(
        f"process {rank} of {processes} (--tensor-parallel {processes}) {how}, so the others were ended too: nothing "
        "of what was running is left; start again"
    )
