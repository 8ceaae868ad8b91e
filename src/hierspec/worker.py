"""One thread that runs a model for everybody: jobs come from any thread, share forward passes, and end with a result.

It is what stands behind an event loop (`AsyncLanguageModel`) and a server. Callers never wait inside a pass: they hand
in a job and are told, in the worker's thread, what was written and how it ended.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from hierspec.core.engine import Engine
from hierspec.core.errors import HierspecError
from hierspec.core.sampling import Sampling
from hierspec.generation import Failure, Generation, TextStep, Writer
from hierspec.language_model import LanguageModel
from hierspec.options import PlanLike

Event = TextStep | Generation | Failure  # any number of steps, then one of the other two
Listener = Callable[[Event], None]  # called in the worker's thread: it must be quick, and what it raises is not shown


@dataclass(eq=False)
class Job:
    """A prompt to be answered, and who is told about it."""

    ids: list[int]
    plan: PlanLike
    sampling: Sampling
    listener: Listener
    namespace: str = ""
    submitted: float = field(default_factory=time.perf_counter)
    writer: Writer | None = None  # once it runs
    cancelled: bool = False

    def cancel(self) -> None:
        """Stop before the next pass. It ends with what was written so far."""
        self.cancelled = True


class Worker:
    """Owns the passes of one model. Close it to stop: running jobs are finished first, or cancelled."""

    def __init__(self, model: LanguageModel) -> None:
        self.model = model
        self._engine = Engine()
        self._inbox: queue.SimpleQueue[Job | None] = queue.SimpleQueue()  # None: look whether to stop
        self._running: list[Job] = []
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="hierspec worker", daemon=True)
        self._thread.start()

    def submit(self, job: Job) -> None:
        if self._closing:
            raise HierspecError("The model is being closed and takes no more prompts; open it again.")
        self._inbox.put(job)

    def close(self, finish: bool = True) -> None:
        """Take no more jobs, finish those that are in (or cancel them), and end the thread."""
        self._closing = True
        if not finish:
            for job in list(self._running):
                job.cancel()
        self._inbox.put(None)
        self._thread.join()

    def _run(self) -> None:
        while self._take_in():
            self._round()

    def _take_in(self) -> bool:
        """Begin the jobs that have come in; wait for one where nothing runs. False: it is time to stop."""
        while True:
            try:
                job = self._inbox.get(block=not self._running)
            except queue.Empty:
                return True
            if job is not None:
                self._begin(job)
            elif not self._running:
                return False

    def _begin(self, job: Job) -> None:
        try:
            request = self.model.request(job.ids, job.plan, job.sampling, namespace=job.namespace)
        except Exception as error:  # whatever it is, the others go on
            failure = error if isinstance(error, HierspecError) else _defect(error)
            self._tell(job, Failure(failure))
            return
        job.writer = Writer(request, self.model.tokenizer)
        self._engine.submit(request)
        self._running.append(job)

    def _round(self) -> None:
        """One round of the engine, and news of it for those who wait."""
        by_request = {id(job.writer.request): job for job in self._running if job.writer is not None}
        with self.model.turn():
            for job in self._running:
                if job.cancelled and job.writer is not None:
                    job.writer.request.cancel()
            written = [(by_request[id(request)], step) for request, step in self._engine.step()]
        for job, step in written:
            assert job.writer is not None
            self._tell(job, job.writer.add(step))
        ended = [job for job in self._running if job.writer is not None and job.writer.request.ended is not None]
        for job in ended:
            assert job.writer is not None
            self._running.remove(job)
            self._tell(job, job.writer.result())

    @staticmethod
    def _tell(job: Job, event: Event) -> None:
        try:
            job.listener(event)
        except Exception:  # its event loop may be closed: nobody listens any more
            job.cancel()


def _defect(error: Exception) -> HierspecError:
    failure = HierspecError(f"The request failed ({type(error).__name__}: {error}); please report this defect.")
    failure.__cause__ = error
    return failure
