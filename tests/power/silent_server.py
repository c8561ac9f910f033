"""Server that never replies: ``python -m tests.power.silent_server HOST``.

It reads requests to their end, but only the first line of a request for ``/update...``.
"""

from __future__ import annotations

import asyncio
import sys

PORT = 8000


async def serve(host: str) -> None:
    """Print ``ready``, then the path of each request."""

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        path = (await reader.readline()).split()[1].decode()
        sys.stdout.write(f"{path}\n")
        sys.stdout.flush()
        if not path.startswith("/update"):
            await reader.read()
        await asyncio.Event().wait()
        writer.close()

    server = await asyncio.start_server(handle, host, PORT)
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(serve(sys.argv[1]))
