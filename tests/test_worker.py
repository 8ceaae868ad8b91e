"""One thread runs a model for everybody: what callers are told, what observers see, and how it ends."""

import queue
import threading

import pytest

import hierspec
from hierspec import Busy, HierspecError, Sampling
from hierspec.generation import Failure, Generation, TextStep
from hierspec.testing.checkpoints import tiny_checkpoint
from hierspec.text.stream import StopStrings
from hierspec.worker import Job, Worker

ENDLESS = {"max_tokens": 450, "logit_bias": {0: -1e9, 1: -1e9, 2: -1e9}}  # no id that ends a text
WAIT = 60.0  # seconds after which a test fails rather than hangs


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return hierspec.load(tiny_checkpoint(tmp_path_factory.mktemp("model") / "tiny"))


class Recorder:
    """An observer that keeps what it is told."""

    def __init__(self):
        self.calls = []

    def on_submit(self, job):
        self.calls.append(("submit", job))

    def on_first(self, job):
        self.calls.append(("first", job))

    def on_step(self, job, step):
        self.calls.append(("step", job, step))

    def on_end(self, job, result):
        self.calls.append(("end", job, result))

    def of(self, job):
        return [call[0] for call in self.calls if call[1] is job]


def job_for(model, text, events=None, plan="auto", namespace="", **options):
    """A job, and the queue of what its listener hears."""
    events = queue.SimpleQueue() if events is None else events
    ids = model.encode(text) if isinstance(text, str) else text
    return Job(ids, plan, Sampling(**options), events.put, namespace), events


def result_of(events):
    while isinstance(event := events.get(timeout=WAIT), TextStep):
        pass
    return event


def test_every_text_of_many_jobs_is_plains_alone(model):
    options = [{"max_tokens": 5 + 7 * n, "temperature": 0.5 * (n % 3), "seed": n} for n in range(12)]
    plain = [model.generate(f"text {n}", plan="plain", **each) for n, each in enumerate(options)]
    worker = Worker(model)
    begun = [job_for(model, f"text {n}", **each) for n, each in enumerate(options)]
    for job, _ in begun:
        worker.submit(job)
    assert [result_of(events).tokens for _, events in begun] == [each.tokens for each in plain]
    worker.close()


def test_an_observer_hears_of_each_job_in_order(model):
    recorder = Recorder()
    worker = Worker(model, recorder)
    (good, heard), (bad, refused) = job_for(model, "abc", max_tokens=9), job_for(model, [10**6])
    worker.submit(good)
    worker.submit(bad)
    assert isinstance(result_of(refused), Failure)
    steps = []
    while isinstance(event := heard.get(timeout=WAIT), TextStep):
        steps.append(event)
    worker.close()
    assert recorder.of(good) == ["submit", "first", *["step"] * len(steps), "end"]
    assert recorder.of(bad) == ["submit", "end"]
    assert [call[2] for call in recorder.calls if call[1] is good and call[0] == "step"] == steps
    assert isinstance(event, Generation)
    assert recorder.calls[-1][2] is event
    assert good.submitted <= good.began


def test_neither_an_observer_nor_a_listener_that_raises_hurts_anybody(model):
    class Broken(Recorder):
        def on_step(self, job, step):
            raise RuntimeError("cannot count")

    def deaf(event):
        raise RuntimeError("nobody listens")

    recorder = Broken()
    worker = Worker(model, recorder)
    unheard = Job(model.encode("abc"), "auto", Sampling(**ENDLESS), deaf)
    job, events = job_for(model, "abd", max_tokens=12)
    worker.submit(unheard)
    worker.submit(job)
    assert result_of(events).tokens == model.generate("abd", plan="plain", max_tokens=12).tokens
    worker.close()
    assert next(call[2].ended for call in recorder.calls if call[:2] == ("end", unheard)) == "cancelled"


def test_a_failing_request_fails_alone(model):
    worker = Worker(model)
    good, heard = job_for(model, "abc", max_tokens=30)
    refused = [job_for(model, [10**6]), job_for(model, "abc", plan="no such plan")]
    for job, _ in (refused[0], (good, heard), refused[1]):
        worker.submit(job)
    for _, events in refused:
        assert isinstance(result_of(events).error, HierspecError)
    assert result_of(heard).ended in ("length", "stop")
    worker.close()


@pytest.mark.parametrize(
    ("error", "sentence"),
    [(ValueError("cannot"), "please report this defect"), (MemoryError(), "There is not enough memory left")],
)
def test_a_text_that_cannot_be_made_fails_alone(model, monkeypatch, error, sentence):
    worker = Worker(model)
    job, events = job_for(model, "abc", max_tokens=9, stop=("broken",))
    other, heard = job_for(model, "abd", max_tokens=9)
    add = StopStrings.add

    def breaks(stops, text):
        if stops._stops:
            raise error
        return add(stops, text)

    monkeypatch.setattr(StopStrings, "add", breaks)
    worker.submit(job)
    worker.submit(other)
    assert sentence in str(result_of(events).error)
    assert result_of(heard).ended in ("length", "stop")
    worker.close()


def test_cancelling_ends_a_job_with_what_there_is(model):
    worker = Worker(model)
    job, events = job_for(model, "abc", **ENDLESS)
    job.listener = lambda event: (job.cancel(), events.put(event))
    worker.submit(job)
    [first, result] = events.get(timeout=WAIT), events.get(timeout=WAIT)
    assert isinstance(first, TextStep)
    assert result.ended == "cancelled"
    assert result.tokens == first.tokens
    worker.close()


def test_closing_finishes_what_is_in(model):
    worker = Worker(model)
    begun = [job_for(model, f"text {n}", max_tokens=20) for n in range(4)]
    for job, _ in begun:
        worker.submit(job)
    worker.close()
    assert all(result_of(events).ended in ("length", "stop") for _, events in begun)
    with pytest.raises(HierspecError, match="takes no more prompts"):
        worker.submit(begun[0][0])


def test_other_threads_generate_meanwhile(model):
    expected = model.generate("other", plan="plain", max_tokens=20).tokens
    worker = Worker(model)
    job, events = job_for(model, "abc", **ENDLESS)
    worker.submit(job)
    events.get(timeout=WAIT)
    beside = []
    thread = threading.Thread(target=lambda: beside.append(model.generate("other", max_tokens=20).tokens))
    thread.start()
    thread.join(WAIT)
    assert beside == [expected]
    job.cancel()
    assert result_of(events).ended in ("cancelled", "stop")
    worker.close()


class Gate:
    """A listener that holds the worker at the first step of a job until it is opened."""

    def __init__(self):
        self.open, self.reached, self.events = threading.Event(), threading.Event(), queue.SimpleQueue()

    def put(self, event):
        self.reached.set()
        assert self.open.wait(WAIT)
        self.events.put(event)


def held(model, worker, **options):
    """A job that runs, with the worker held at its first step."""
    gate = Gate()
    job, _ = job_for(model, "held", gate, **(options or ENDLESS))
    worker.submit(job)
    assert gate.reached.wait(WAIT)
    return job, gate


def test_closing_may_cancel_what_is_in_whether_it_runs_or_waits(model):
    worker = Worker(model, most_running=1)
    _, gate = held(model, worker)
    waiting = [job_for(model, f"text {n}", **ENDLESS) for n in range(3)]
    for job, _ in waiting:
        worker.submit(job)
    closing = threading.Thread(target=worker.close, args=(False,))
    closing.start()
    while not worker._closing:
        closing.join(0.001)
    gate.open.set()
    closing.join(WAIT)
    results = [result_of(events) for events in (gate.events, *(events for _, events in waiting))]
    assert [result.ended for result in results] == ["cancelled"] * 4


def test_namespaces_take_turns_and_each_is_served_in_order(model):
    recorder = Recorder()
    worker = Worker(model, recorder, most_running=1)
    first, gate = held(model, worker)
    order = ["anna", "anna", "anna", "bert", "bert", "carl"]
    waiting = [job_for(model, f"text {n}", namespace=owner, max_tokens=2) for n, owner in enumerate(order)]
    for job, _ in waiting:
        worker.submit(job)
    first.cancel()
    gate.open.set()
    worker.close()
    ended = [call[1] for call in recorder.calls if call[0] == "end" and call[1] is not first]
    numbers = [next(number for number, (job, _) in enumerate(waiting) if job is each) for each in ended]
    assert numbers == [0, 3, 5, 1, 4, 2]
    assert all(job.submitted <= job.began for job in ended)


def test_where_too_many_wait_the_next_is_told_so(model):
    worker = Worker(model, most_running=1, most_waiting=2)
    first, gate = held(model, worker)
    waiting = [job_for(model, "abc", max_tokens=2) for _ in range(2)]
    for job, _ in waiting:
        worker.submit(job)
    assert (worker.running, worker.waiting) == (1, 2)
    with pytest.raises(Busy, match="2 prompts wait already"):
        worker.submit(job_for(model, "abc")[0])
    first.cancel()
    gate.open.set()
    worker.close()
    assert [len(result_of(events).tokens) for _, events in waiting] == [2, 2]


def test_a_job_that_is_cancelled_while_it_waits_ends_at_once(model):
    recorder = Recorder()
    worker = Worker(model, recorder, most_running=1)
    first, gate = held(model, worker)
    job, events = job_for(model, "abc", **ENDLESS)
    worker.submit(job)
    job.cancel()
    gate.open.set()
    result = result_of(events)
    assert (result.ended, result.tokens) == ("cancelled", ())
    first.cancel()
    worker.close()
    assert recorder.of(job) == ["submit", "end"]


def test_jobs_wait_for_memory_and_take_none_from_those_that_run(tmp_path, monkeypatch):
    tight = hierspec.load(tiny_checkpoint(tmp_path / "tiny"), kv_memory=700_000)
    roomy = hierspec.load(tmp_path / "tiny")
    expected = [roomy.generate(f"{n} " * 60, plan="plain", max_tokens=60, seed=n).tokens for n in range(8)]
    pool = tight.assembler.catalogue.pool
    evicted = []
    leave_out = pool._forget
    monkeypatch.setattr(pool, "_forget", lambda each: (evicted.append(each in pool._running.values()), leave_out(each)))
    seen = []

    class Watch(Recorder):
        def on_step(self, job, step):
            seen.append((worker.running, worker.waiting))

    worker = Worker(tight, Watch())
    begun = [job_for(tight, f"{n} " * 60, max_tokens=60, seed=n) for n in range(8)]
    for job, _ in begun:
        worker.submit(job)
    assert [result_of(events).tokens for _, events in begun] == expected
    worker.close()
    assert any(waiting for _, waiting in seen)
    assert max(running for running, _ in seen) > 1
    assert not any(evicted)


def test_what_can_never_fit_is_refused(tmp_path):
    tight = hierspec.load(tiny_checkpoint(tmp_path / "tiny"), kv_memory=300_000)
    worker = Worker(tight)
    job, events = job_for(tight, "abc" * 100, max_tokens=100)
    worker.submit(job)
    assert "do not fit into the KV cache" in str(result_of(events).error)
    worker.close()


@pytest.mark.parametrize("plan", ["plain", "auto", "hispec", "hd+"])
def test_prompts_that_are_read_in_pieces_change_no_text(model, plan):
    """Long prompts with a common prefix come while others write."""
    shared = "a system prompt that all have in common, " * 5
    prompts = [f"{shared}and {n} {'of its own ' * n}" for n in range(5)]
    options = [{"max_tokens": 20, "temperature": 0.7 * (n % 2), "seed": n} for n in range(5)]
    expected = [model.generate(text, plan="plain", **each).tokens for text, each in zip(prompts, options, strict=True)]
    model.forget()
    worker = Worker(model)
    stream, gate = held(model, worker, plan=plan, **ENDLESS)
    begun = [job_for(model, text, plan=plan, **each) for text, each in zip(prompts, options, strict=True)]
    for job, _ in begun:
        worker.submit(job)
    gate.open.set()
    assert [result_of(events).tokens for _, events in begun] == expected
    stream.cancel()
    worker.close()
