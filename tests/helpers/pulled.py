"""What a function hands to its callback, as a generator: for tests that stop in between, or leave early."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


async def pulled(run: Callable[[Callable[[T], bool]], Coroutine[Any, Any, None]]) -> AsyncGenerator[T]:
    """Yield what run() hands over, raise what it raises; closing the generator cancels it."""
    items = asyncio.Queue[T | None]()

    def put(item: T) -> bool:
        items.put_nowait(item)
        return True

    task = asyncio.create_task(run(put))
    task.add_done_callback(lambda _: items.put_nowait(None))
    try:
        while (item := await items.get()) is not None:
            yield item
        await task
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
