"""hierspec inside vLLM: a proposer for its speculative method `custom_class`.

    vllm serve MODEL --speculative-config \\
      '{"method": "custom_class", "model": "hierspec.hosts.vllm.Proposer", "num_speculative_tokens": 8}'

vLLM runs the target and verifies; stores and draft models are hierspec's, under the plan that `additional_config` or
HIERSPEC_PLAN names. vLLM's scheduler takes the drafts of the first tensor-parallel rank and sends them to all. So only
that rank drafts: what depends on clocks and files cannot differ between ranks, and only one process writes a history.
"""

from __future__ import annotations

import atexit
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from hierspec.checkpoints.load import model_folder
from hierspec.core.errors import HierspecError
from hierspec.hosts.filling import Filling, filling_for
from hierspec.hosts.guest import Guest, GuestRequest
from hierspec.hosts.opening import HostModel, open_guest
from hierspec.hosts.rows import Rows
from hierspec.hosts.vllm_options import check_version, read_options
from hierspec.hosts.vllm_sampling import cure_sampling


class Proposer:
    """What vLLM makes once per worker, and calls after every step."""

    def __init__(self, vllm_config: Any) -> None:
        check_version()
        guest = _open_guest(vllm_config) if _first_rank() else None
        # With pipeline parallelism there are as many batches as stages, and they take turns.
        filling = None if guest is None else filling_for(vllm_config)
        stages = vllm_config.parallel_config.pipeline_parallel_size
        self._set(guest, vllm_config.model_config.max_model_len, stages, filling)
        self._on_cpu = vllm_config.device_config.device_type == "cpu"
        if guest is not None:
            atexit.register(self.close)

    @classmethod
    def over(cls, guest: Guest | None, max_model_len: int, patience: int = 1) -> Proposer:
        """A proposer without a vLLM around it: for measurements and tests."""
        proposer = object.__new__(cls)
        proposer._set(guest, max_model_len, patience)
        return proposer

    def _set(self, guest: Guest | None, max_model_len: int, patience: int, filling: Filling | None = None) -> None:
        self._guest, self._max_model_len, self._filling = guest, max_model_len, filling
        self._rows: Rows[GuestRequest] = Rows(patience)
        self._batch: list[GuestRequest] = []  # for which the last call drafted
        self._on_cpu = False
        self._slept = False  # calls went by in which no row was looked at

    def load_model(self, *_: Any, **__: Any) -> None:
        """vLLM calls this with the target. It is not needed here: draft models were loaded before.

        On a CPU every rank samples, so every rank needs the cure.
        """
        if self._on_cpu:
            from vllm.v1.sample import rejection_sampler

            cure_sampling(rejection_sampler)

    def propose(
        self,
        sampled_token_ids: Sequence[Sequence[int]],
        num_tokens_no_spec: np.ndarray,
        token_ids_cpu: np.ndarray,
        slot_mappings: Any = None,
        **_: Any,
    ) -> list[list[int]]:
        """Drafts for the rows of the batch.

        The arrays have more rows than the batch, and the rows' texts already hold what was just sampled.
        """
        drafts = self._drafts(sampled_token_ids, num_tokens_no_spec, token_ids_cpu)
        if self._filling is not None:
            self._filling.fill(drafts, sampled_token_ids)
        return drafts

    def _drafts(
        self, sampled_token_ids: Sequence[Sequence[int]], num_tokens_no_spec: np.ndarray, token_ids_cpu: np.ndarray
    ) -> list[list[int]]:
        """What stores and draft models draft.

        The pace counts these rows alone: where drafts are filled, it finds that further rows cost nothing.
        """
        drafts: list[list[int]] = [[] for _ in sampled_token_ids]
        guest = self._guest
        if guest is None:
            return drafts
        written = sum(map(len, sampled_token_ids))
        if guest.sleeps(max(len(drafts), 1), written):
            self._slept = True
            return drafts
        lengths = num_tokens_no_spec[: len(drafts)].tolist()
        texts = [
            token_ids_cpu[row, : length - len(sampled)] if sampled else None
            for row, (sampled, length) in enumerate(zip(sampled_token_ids, lengths, strict=True))
        ]
        if self._slept:
            for request, tokens in self._rows.catch_up(texts):
                guest.caught_up(request, tokens)
            self._slept = False
        known, ended = self._rows.recognise(texts)
        for request in ended:
            guest.end(request)
        requests = self._follow(guest, known, sampled_token_ids, lengths, token_ids_cpu)
        batch = list(requests.values())
        same = len(batch) == len(drafts) == len(self._batch) and set(batch) == set(self._batch)
        guest.pace.step_begins(max(len(drafts), 1), same, written)
        guest.draft(batch)
        rows = len(drafts)
        for row, request in requests.items():
            drafts[row] = list(request.drafted)
            rows += len(request.drafted)
        guest.pace.step_ends(rows)
        self._batch = batch
        return drafts

    def close(self) -> None:
        """Learn the texts that still run, and save what the next run can begin with."""
        if self._guest is not None:
            for request in self._rows.forget_all():
                self._guest.end(request)
            self._guest.close()

    def _follow(
        self,
        guest: Guest,
        known: Sequence[GuestRequest | None],
        sampled: Sequence[Sequence[int]],
        lengths: Sequence[int],
        token_ids: np.ndarray,
    ) -> dict[int, GuestRequest]:
        """Bring the requests of all rows that have sampled something up to date; unknown rows begin new ones."""
        requests = {}
        for row, (request, tokens, length) in enumerate(zip(known, sampled, lengths, strict=True)):
            if not tokens:
                continue
            if request is None or not guest.wrote(request, tokens):
                request = guest.begin(token_ids[row, :length]) if length < self._max_model_len else None
            self._rows.put(row, request)
            if request is not None:
                requests[row] = request
        return requests


def _open_guest(config: Any) -> Guest:
    """Stores and draft models under the plan that was asked for, for vLLM's model."""
    options = read_options(config.additional_config)
    model = config.model_config
    most = config.speculative_config.num_speculative_tokens
    if most is None or most < 1:
        raise HierspecError("num_speculative_tokens must be at least 1: it is the longest draft of a row.")
    device = config.device_config.device_type
    served = HostModel(
        Path(model.model).name if Path(model.model).is_dir() else model.model,
        model_folder(model.tokenizer or model.model),
        str(model.model),
        model.hf_text_config.num_hidden_layers,
        model.get_vocab_size(),
        model.max_model_len,
        device if device in ("cpu", "cuda") else "cpu",
        # If batches take turns, no step can be timed by itself.
        timed=config.parallel_config.pipeline_parallel_size == 1,
    )
    return open_guest(served, options, most)


def _first_rank() -> bool:
    """Whether this worker is the first of its tensor-parallel group."""
    from vllm.distributed import get_tp_group

    return bool(get_tp_group().rank_in_group == 0)
