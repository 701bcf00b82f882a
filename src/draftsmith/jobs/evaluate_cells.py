"""The answers that an evaluation rests on: planned, decoded cell by cell into the store, and read back from there.

Plain answers are the target's alone, so every drafter of a target finds those of the first. What is in the prefixes'
names decides every token (the weights, the text, the settings, the code that decodes): in float32 the same cells come
out whatever the batch size, the number of processes or the machine. In bfloat16 rounding, and so now and then a token,
depends on both; the cells that are there count, and each says how it was decoded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import draftsmith
from draftsmith.decoding.engine import Engine
from draftsmith.decoding.rounds import Generation
from draftsmith.drafters.base import Drafter
from draftsmith.drafters.registry import load_drafter
from draftsmith.errors import ObjectExistsError, ObjectMissingError
from draftsmith.evaluation.benchmarks import BenchmarkPrompt, load_benchmark
from draftsmith.evaluation.cells import MODES, Cell, DecodedCell, Mode, decode_cell, encode_cell, join_cells, plan_cells
from draftsmith.evaluation.conversations import Answered, Conversation, answer_conversations
from draftsmith.evaluation.decoded import Decoded
from draftsmith.jobs.benchmarks import override_folder
from draftsmith.jobs.parts import TargetFolder, check_drafter, load_placed, target_folder, weights_digest
from draftsmith.jobs.stores import workspace_store
from draftsmith.manifest import hash8, json_digest, sha256_hex
from draftsmith.params import Evaluate, Params, Sampling
from draftsmith.paths import Workspace
from draftsmith.provenance import read_hardware
from draftsmith.storage import Store, check_store
from draftsmith.targets.base import Target
from draftsmith.targets.fetch import load_chat_format
from draftsmith.text.chat import ChatFormat

FORMAT_VERSION = 1
# What decides the tokens of an answer. A drafter is no part of plain decoding.
PLAIN_CODE = ("decoding", "nn", "targets", "text/answers.py", "text/chat.py", "evaluation/conversations.py")
SPECULATIVE_CODE = (*PLAIN_CODE, "drafters")
WARM_UP_TOKENS = 8


@dataclass(frozen=True)
class PlannedEvaluation:
    """What is to be decoded for `key`, before anything is: `prefixes` say where the cells of each mode lie."""

    key: str
    row: Evaluate
    place: TargetFolder
    chat: ChatFormat
    drafter_folder: Path
    prompts: Mapping[str, tuple[BenchmarkPrompt, ...]]
    cells: tuple[Cell, ...]
    prefixes: Mapping[Mode, str]

    @cached_property
    def data_digest(self) -> str:
        """sha256 over all prompts."""
        return json_digest({name: [list(item.turns) for item in found] for name, found in self.prompts.items()})

    def path(self, cell: Cell, mode: Mode) -> str:
        """Where the cell lies in the store."""
        return f"{self.prefixes[mode]}/{cell.name}"

    def share(self, part: tuple[int, int] | None) -> tuple[Cell, ...]:
        """All cells, or cells i, i + n, ... of `part` (i, n)."""
        return self.cells if part is None else self.cells[part[0] :: part[1]]


def planned_evaluation(workspace: Workspace, params: Params, key: str) -> PlannedEvaluation:
    """Plan the evaluation of `key`. Loads no weights and writes nothing.

    Raises PromptError for a benchmark that cannot be read, TargetError and ContractError for a target or drafter that
    cannot be used.
    """
    row, folder = params.evaluate, override_folder(workspace, params.evaluate)
    prompts = {item.name: tuple(load_benchmark(item.name, cap=item.cap, folder=folder)) for item in row.benchmarks}
    name = params.run(key).target
    place = target_folder(workspace, params, name)
    chat = load_chat_format(place.folder)
    check_drafter(workspace, params, key, place=place, chat=chat)
    drafter_folder = workspace.drafter_dir(key)
    common = {
        "format": FORMAT_VERSION,
        "target": place.digest,
        "text": chat.digest(),
        "system_prompt": place.row.system_prompt,
        "dtype": place.row.dtype,
        "max_new_tokens": row.max_new_tokens,
        "seed": row.seed,
    }
    plain = {**common, "code": code_digest(PLAIN_CODE)}
    drafted = {**common, "code": code_digest(SPECULATIVE_CODE), "drafter": weights_digest(drafter_folder)}
    return PlannedEvaluation(
        key,
        row,
        place,
        chat,
        drafter_folder,
        prompts,
        tuple(plan_cells(prompts, temperatures=row.temperatures, cell_prompts=row.cell_prompts)),
        {"plain": f"evaluate/{name}-plain-{hash8(plain)}", "speculative": f"evaluate/{key}-{hash8(drafted)}"},
    )


def code_digest(sources: Iterable[str], *, root: Path | None = None) -> str:
    """sha256 over Python sources below `root` (this package): names of files and of folders, whose own files count."""
    root = Path(draftsmith.__file__).parent if root is None else root
    files = [
        path
        for name in sorted(sources)
        for path in ([root / name] if name.endswith(".py") else sorted((root / name).glob("*.py")))
    ]
    return json_digest([[path.relative_to(root).as_posix(), sha256_hex(path.read_bytes())] for path in files])


class Decoder:
    """Target and drafter at work on cells; both are loaded when they are first needed."""

    def __init__(self, planned: PlannedEvaluation) -> None:
        self._planned = planned
        self._warm: dict[Mode, Engine] = {}

    @cached_property
    def target(self) -> Target:
        return load_placed(self._planned.place)

    @cached_property
    def drafter(self) -> Drafter:
        planned, target = self._planned, self.target
        return load_drafter(
            planned.drafter_folder, target_folder=planned.place.folder, shared=target.shared, dtype=target.dtype
        )

    def engine(self, mode: Mode, *, batch_size: int) -> Engine:
        drafter = self.drafter if mode == "speculative" else None
        return Engine(self.target, drafter=drafter, end_ids=self._planned.chat.end_ids, batch_size=batch_size)

    def decode(self, cell: Cell, mode: Mode, *, on_finish: Callable[[Generation], None] | None = None) -> DecodedCell:
        """Answer the prompts of a cell, without the target's own filters (the paper's setting)."""
        row, conversations = self._planned.row, [Conversation(item.id, item.turns) for item in cell.prompts]
        if mode not in self._warm:
            # What is made at first use is no part of decoding.
            self._warm[mode] = self.engine(mode, batch_size=row.batch_size)
            first = Conversation(conversations[0].id, conversations[0].turns[:1])
            self._answer(mode, [first], temperature=cell.temperature, max_new_tokens=WARM_UP_TOKENS)
        found = self._answer(
            mode, conversations, temperature=cell.temperature, max_new_tokens=row.max_new_tokens, on_finish=on_finish
        )
        return DecodedCell(found.generations, found.wall_s, row.batch_size, read_hardware().description)

    def _answer(
        self, mode: Mode, conversations: Sequence[Conversation], *, temperature: float, max_new_tokens: int,
        on_finish: Callable[[Generation], None] | None = None,
    ) -> Answered:  # fmt: skip
        return answer_conversations(
            self._warm[mode],
            conversations,
            chat=self._planned.chat,
            system_prompt=self._planned.place.row.system_prompt,
            sampling=Sampling(temperature=temperature),
            max_new_tokens=max_new_tokens,
            seed=self._planned.row.seed,
            on_finish=on_finish,
        )


def decode_missing(
    store: Store, planned: PlannedEvaluation, *, part: tuple[int, int] | None, decoder: Decoder,
    on_answers: Callable[[int], None],
) -> int:  # fmt: skip
    """Decode those cells of a slice (all: None) that the store lacks, in both modes; returns how many tokens that made.

    A cell is written whole by put-if-absent, so a run that is killed loses the one that it was at, and where another
    process was faster, its cell counts. `on_answers` is called with numbers of answers, found or made.
    Raises StoreError, before anything is decoded, for a store that cannot be written.
    """
    present = {item.path for mode in MODES for item in store.list(planned.prefixes[mode])}
    wanted = [(cell, mode, planned.path(cell, mode)) for cell in planned.share(part) for mode in MODES]
    pending = [item for item in wanted if item[2] not in present]
    on_answers(sum(len(cell.request_ids) for cell, _, path in wanted if path in present))
    if pending:
        check_store(store)
    num_tokens = 0
    for cell, mode, path in pending:
        if store.head(path) is not None:
            on_answers(len(cell.request_ids))
            continue
        decoded = decoder.decode(cell, mode, on_finish=lambda _: on_answers(1))
        num_tokens += sum(len(item.token_ids) for item in decoded.generations)
        with suppress(ObjectExistsError):
            store.put_if_absent(path, encode_cell(decoded, cell, mode=mode))
    return num_tokens


def read_cells(store: Store, planned: PlannedEvaluation) -> tuple[Decoded, ...]:
    """All answers from the store, one entry a benchmark and temperature.

    Raises ObjectMissingError if cells are missing and CacheError for one that is damaged, with the command that mends
    it.
    """
    found: dict[Mode, list[DecodedCell]] = {mode: [] for mode in MODES}
    missing = []
    for cell in planned.cells:
        for mode in MODES:
            path = planned.path(cell, mode)
            cure = f"delete {path} in {store.uri}, then `draftsmith evaluate --key {planned.key}` decodes it again"
            try:
                found[mode].append(decode_cell(store.get(path), cell, mode=mode, where=cure))
            except ObjectMissingError:
                missing.append(path)
    if missing:
        raise ObjectMissingError(
            f"store {store.uri} lacks {len(missing)} of {len(MODES) * len(planned.cells)} decoded cells",
            got=f"no {missing[0]}",
            expected=f"those of {planned.key}; `draftsmith evaluate --key {planned.key}` decodes them",
            where="or DRAFTSMITH_STORE is another store's",
        )
    return join_cells(
        found["plain"],
        found["speculative"],
        cells=planned.cells,
        batch_size=planned.row.batch_size,
        machine=read_hardware().description,
    )


def load_decoded(workspace: Workspace, params: Params, key: str) -> tuple[Decoded, ...]:
    """What the evaluation of `key` has decoded: every answer with its rounds. Loads no weights and decodes nothing.

    Raises what `planned_evaluation` and `read_cells` raise.
    """
    return read_cells(workspace_store(workspace), planned_evaluation(workspace, params, key))
