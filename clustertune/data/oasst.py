"""Open-Assistant message trees -> one conversation per tree.

Two exports are read, distinguished record by record: flat rows (one message each, as in OpenAssistant/oasst2) and nested trees
(``{"message_tree_id": ..., "prompt": {..., "replies": [...]}}``). The flat rows of a tree may stand in any order and between
those of other trees; "file order" is the order of the rows, in a nested tree that of a depth-first reading.

From the tree one path is taken: under a prompter message the assistant reply of rank 0, else of the lowest rank, else the
first; under an assistant message every prompter reply; of all paths that end with the assistant the longest, and of equally
long ones the first that a depth-first walk in file order meets.

Rows that were deleted or whose review failed are not wrong: they go with their subtrees and are counted as dropped.
A bad row is rejected with its reason; the rows below it are counted as dropped too, so that a fault counts once.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from clustertune.data.chats import Conversation, check_text, recognise, require
from clustertune.data.rejects import NOT_A_FAULT, BadRow, Rejects, RowLocation, excerpt

ROLES = {"prompter": "user", "assistant": "assistant"}


@dataclass(slots=True)
class Message:
    """One message of a tree."""

    id: str
    parent: str | None
    location: RowLocation
    usable: bool = False
    """False for a bad or filtered row, which stays in the tree so that its replies are not taken for orphans."""
    role: str = ""
    text: str = ""
    rank: float | None = None
    lang: str | None = None
    replies: list[Message] = field(default_factory=list)


@dataclass(slots=True)
class MessageTree:
    id: str
    split: str | None
    messages: dict[str, Message] = field(default_factory=dict)
    """By message id, in file order."""


class Trees:
    """Collects rows into trees, then gives one conversation for each tree that has one. All trees are held in memory."""

    def __init__(self, rejects: Rejects, language: str | None) -> None:
        self.trees: dict[str, MessageTree] = {}
        self.dropped: Counter[str] = Counter()
        """Rows (``deleted``, ``review``, ``below``: under one that is out) and trees (``language``) left out by rule."""
        self.languages: Counter[str] = Counter()
        """Roots by language, before the filter."""
        self._rejects = rejects
        self._language = language
        self._ids: set[str] = set()

    def conversations(self, records: Iterable[tuple[RowLocation, dict[str, Any]]]) -> Iterator[Conversation]:
        """Read all records, then walk the trees in the order in which their first rows came."""
        for location, record in records:
            for row in flatten(record):
                self._rejects.rows += 1
                try:
                    self._add(location, row)
                except BadRow as bad:
                    self._rejects.add(location, bad.reason, bad.detail)
                    self._rejects.look(record, recognise)
        for tree in self.trees.values():
            found = self._conversation(tree)
            if found is not None:
                yield found

    def _add(self, location: RowLocation, row: dict[str, Any]) -> None:
        """Put one flat row into its tree. Raises BadRow; where the ids are good, a placeholder is left for the replies."""
        identity = require(row, "message_id", str)
        tree_id = require(row, "message_tree_id", str)
        if identity in self._ids:
            raise BadRow("duplicate-id", f"message_id {excerpt(identity)} was there before")
        self._ids.add(identity)
        tree = self.trees.setdefault(tree_id, MessageTree(tree_id, location.split))
        if tree.split != location.split:
            raise BadRow("two-splits", f"tree {excerpt(tree_id)} is in the {tree.split} split already")
        message = tree.messages[identity] = Message(identity, None, location)
        message.parent = require(row, "parent_id", str, optional=True)
        if require(row, "deleted", bool, optional=True):
            self.dropped["deleted"] += 1
        elif require(row, "review_result", bool, optional=True) is False:
            self.dropped["review"] += 1
        else:
            self._fill(message, row)

    def _fill(self, message: Message, row: dict[str, Any]) -> None:
        role = require(row, "role", str)
        if role not in ROLES:
            raise BadRow("unknown-role", f"role {excerpt(role)}, known are prompter and assistant")
        message.text = check_text(row, "text")
        message.role = role
        message.rank = _rank(row)
        if message.parent is None:
            message.lang = require(row, "lang", str, optional=self._language is None)
        if not isinstance(row.get("replies") or [], list):
            raise BadRow("wrong-column", f"replies is {excerpt(row['replies'])}, not a list")
        message.usable = True

    def _conversation(self, tree: MessageTree) -> Conversation | None:
        root = self._link(tree)
        if root is not None and root.usable and root.role != "prompter":
            root.usable = False
            self._rejects.add(root.location, "wrong-parent-role", f"the root {excerpt(root.id)} is an assistant message")
        alive = self._prune(root) if root is not None and root.usable else 0
        self.dropped["below"] += sum(message.usable for message in tree.messages.values()) - alive
        if root is None or not root.usable:
            return None
        self.languages[root.lang or "?"] += 1
        if self._language is not None and root.lang != self._language:
            self.dropped["language"] += 1
            return None
        path = longest_path(root)
        if not path:
            self._rejects.add(root.location, NOT_A_FAULT, f"tree {excerpt(tree.id)} has no usable assistant reply")
            return None
        messages = [{"role": ROLES[message.role], "content": message.text} for message in path]
        return Conversation({"messages": messages}, {"tree": tree.id}, tree.id, tree.split)

    def _link(self, tree: MessageTree) -> Message | None:
        """Hang every message under its parent, reject those that have none, and return the root."""
        roots: list[Message] = []
        tops: list[Message] = []
        for message in tree.messages.values():
            if message.parent is None:
                roots.append(message)
            elif message.parent in tree.messages:
                tree.messages[message.parent].replies.append(message)
            else:
                tops.append(message)
                self._out(message, "missing-parent", f"parent_id {excerpt(message.parent)} is not a message of this tree")
        root = _choose_root(tree, roots)
        for other in roots:
            if other is not root:
                root_id = excerpt(root.id) if root else "none"
                self._out(other, "two-roots", f"a second message without parent_id, the root is {root_id}")
        for message in find_cycles(tree, roots + tops):
            self._out(message, "cycle", f"following parent_id from {excerpt(message.id)} comes back to it")
        return root

    def _prune(self, root: Message) -> int:
        """Cut off everything below the root that is out, and return how many messages stay."""
        alive, waiting = 0, [root]
        while waiting:
            message = waiting.pop()
            alive += 1
            usable = []
            for reply in message.replies:
                if reply.usable and reply.role == message.role:
                    self._out(reply, "wrong-parent-role", f"{reply.role} message under a message of the same role")
                elif reply.usable:
                    usable.append(reply)
            message.replies = usable
            waiting += usable
        return alive

    def _out(self, message: Message, reason: str, detail: str) -> None:
        """Reject a message for its place in the tree, unless it is out already for what it holds."""
        if message.usable:
            message.usable = False
            self._rejects.add(message.location, reason, detail)


def flatten(record: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The flat rows of a record, depth first: of a nested tree all its messages, else the record itself."""
    if "prompt" not in record or "message_id" in record:
        yield record
        return
    waiting: list[tuple[Any, str | None]] = [(record["prompt"], None)]
    while waiting:
        node, parent = waiting.pop()
        if not isinstance(node, dict):
            node = {"message_id": node}  # no message: its id is reported as a wrong column
        replies = node.get("replies")
        row = {**node, "parent_id": parent, "message_tree_id": record.get("message_tree_id")}
        if isinstance(replies, list):
            row["replies"] = None
        yield row
        if isinstance(replies, list) and isinstance(node.get("message_id"), str):
            waiting += [(reply, node["message_id"]) for reply in reversed(replies)]


def longest_path(root: Message) -> list[Message]:
    """The chosen path from the root to an assistant message, or [] where no assistant reply follows the root."""
    best: Message | None = None
    deepest = 0
    above: dict[str, Message] = {}
    waiting = [(root, 1)]
    while waiting:
        message, depth = waiting.pop()
        if message.role == "assistant":
            if depth > deepest:
                best, deepest = message, depth
            follow = message.replies
        else:
            follow = sorted(message.replies, key=_preference)[:1]
        for reply in reversed(follow):
            above[reply.id] = message
            waiting.append((reply, depth + 1))
    path: list[Message] = []
    while best is not None:
        path.append(best)
        best = above.get(best.id)
    return path[::-1]


def find_cycles(tree: MessageTree, tops: list[Message]) -> list[Message]:
    """The messages that are their own ancestors. ``tops`` are those that no message of the tree is above of."""
    reached: set[str] = set()
    waiting = list(tops)
    while waiting:
        message = waiting.pop()
        reached.add(message.id)
        waiting += message.replies
    found: list[Message] = []
    for start in tree.messages.values():
        trail: dict[str, Message] = {}
        at = start
        while at.id not in reached and at.id not in trail:
            trail[at.id] = at
            assert at.parent is not None  # what has no parent is a top
            at = tree.messages[at.parent]
        if at.id in trail:
            ids = list(trail)
            found += [trail[i] for i in ids[ids.index(at.id) :]]
        reached.update(trail)
    return found


def _choose_root(tree: MessageTree, roots: list[Message]) -> Message | None:
    """The tree is named after its root; where no root has that name, the first usable one."""
    named = [root for root in roots if root.id == tree.id]
    usable = [root for root in roots if root.usable]
    return next(iter(named + usable + roots), None)


def _preference(reply: Message) -> tuple[bool, bool, float]:
    """Rank 0 first, then the lowest rank, then no rank; ``sorted`` keeps file order among equals."""
    return reply.rank is None, reply.rank != 0, reply.rank or 0


def _rank(row: dict[str, Any]) -> float | None:
    """Tables made by pandas hold ranks as floats."""
    rank = row.get("rank")
    if rank is None:
        return None
    if isinstance(rank, bool) or not isinstance(rank, int | float) or not math.isfinite(rank):
        raise BadRow("wrong-column", f"rank is {excerpt(rank)}, not a number or null")
    return rank
