"""Commands in several processes, which torch.distributed's launcher starts, watches and ends together."""

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

_DRAIN = 60  # seconds until processes that do not end on request are killed


def divide(processes: int) -> None:
    """Continue in this many processes; returns in process 0 only.

    A process that was not started by a launcher starts them all with its own arguments, waits, and exits like process
    0. The other processes follow process 0, and exit.

    Raises:
        UserError: another number of processes was started, or one of them ended before the others.
    """
    if processes < 2:
        raise UserError(f"--tensor-parallel: expected 1 (one process) or more, got {processes}")
    if parallel.is_launched():
        with quiet_libraries():
            take_part(processes)
        return
    raise typer.Exit(_run_processes(processes, sys.argv[1:]))


def _run_processes(processes: int, arguments: list[str]) -> int:
    """Run the command in this many processes of this machine; returns the exit code of process 0."""
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    os.environ.setdefault(NUMBER, str(max(usable_cores() // processes, 1)))
    for name in list(logging.root.manager.loggerDict):
        if name.startswith("torch.distributed"):
            logging.getLogger(name).setLevel(logging.CRITICAL)  # they log every signal that is sent
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
            return _exit_code({rank: failure.exitcode for rank, failure in error.failures.items()}, processes)
        except SignalException as error:
            return 128 + error.sigval
    return 0


def _exit_code(codes: dict[int, int], processes: int) -> int:
    """The exit code after processes failed, from their codes by rank (negative: a signal); process 0 prints its own."""
    asked = {-signal.SIGTERM, -signal.SIGINT}  # sent by the launcher after the first failure
    killed = {rank: code for rank, code in codes.items() if code < 0 and code not in asked}
    if not killed and codes.get(0, 0) > 0:
        return codes[0]
    rank, code = next(iter((killed or codes).items()))
    how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
    raise UserError(
        f"process {rank} of {processes} (--tensor-parallel {processes}) {how}, so the others were ended, too: start "
        "the command again"
    )
