"""When compute and collectives of an FSDP2 step begin and end.

[Note] FSDP2 gathers a block while the one before it computes, and no more: a gather begins when the block before
begins. In backward a block's gradients are reduced while the next block computes, before that one's prefetch; gathers
and reductions share a communicator, and so queue. A block's backward ends no sooner than the reduction before it, whose
buffer it takes. What is outside of blocks is gathered first and reduced last, beside nothing.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from f8sub.estimator.groups import Group


@dataclass(frozen=True, slots=True)
class Timeline:
    """Seconds.

    Attributes:
        forward: until the last block's end.
        backward: from there until the last reduction's end.
        compute: of it, what would remain if collectives took no time.
        waiting: what compute waits for collectives.
        tax: what hidden collectives add to compute.
    """

    forward: float
    backward: float
    compute: float
    waiting: float
    tax: float


def timeline(blocks: Sequence[Group], outside: Group) -> Timeline:
    """Of blocks in forward's order, and of what is outside of them."""
    compute = sum(group.forward + group.backward for group in (*blocks, outside))
    tax = 0.0
    queue = outside.gather + blocks[0].gather
    now = queue
    for i, block in enumerate(blocks):
        longer = 0.0
        if i + 1 < len(blocks):
            queue = max(queue, now) + blocks[i + 1].gather
            longer = _beside(block.forward, blocks[i + 1].gather, blocks[i + 1].gather_tax)
        tax += longer
        now += block.forward + longer
        now = max(now, queue)
    forward = now = now + outside.forward
    # The last block is gathered again beside what is outside.
    queue = now + blocks[-1].gather
    now = max(now + outside.backward, queue)
    reduced, replicas = now, now
    for i in reversed(range(len(blocks))):
        begin = max(now, queue)
        beside, longer = 0.0, 0.0
        if i + 1 < len(blocks):
            reduced = max(queue, begin) + blocks[i + 1].reduce
            queue, beside, longer = reduced, blocks[i + 1].reduce, blocks[i + 1].reduce_tax
            replicas = max(replicas, reduced) + blocks[i + 1].replicate
        if i > 0:
            queue = max(queue, begin) + blocks[i - 1].gather
            beside, longer = beside + blocks[i - 1].gather, longer + blocks[i - 1].gather_tax
        longer = _beside(blocks[i].backward, beside, longer)
        tax += longer
        now = max(begin + blocks[i].backward + longer, reduced)
    queue = max(queue, now) + blocks[0].reduce
    replicas = max(replicas, queue) + blocks[0].replicate
    queue += outside.reduce
    end = max(queue, replicas) + outside.replicate
    return Timeline(forward, end - forward, compute, end - compute - tax, tax)


def _beside(compute: float, collective: float, tax: float) -> float:
    """What a collective adds to compute that may end before it: it slows compute evenly."""
    if collective <= compute + tax:
        return tax
    share = tax / collective
    return compute * share / (1 - share)
