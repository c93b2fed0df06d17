"""A small MCP server over stdio, some of whose tools misbehave."""

import os
import sys
import time
from typing import Any, Literal

from mcp.server.mcpserver import MCPServer
from mcp.types import ImageContent
from pydantic import BaseModel

server = MCPServer("shop")
till: list[int] = []


class Slip(BaseModel):
    coins: int
    kind: Literal["cash", "card"]


@server.tool()
def price(item: Literal["apple", "pear"]) -> str:
    """The price of an item."""
    return str({"apple": 3, "pear": 4}[item])


@server.tool()
def pay(slip: Slip) -> str:
    """Pay."""
    till.append(slip.coins)
    return f"paid {till}"


@server.tool()
def trouble(kind: str) -> str:
    """Misbehave."""
    if kind == "hang":
        time.sleep(600)
    if kind == "fork":
        if os.fork() == 0:
            os.setsid()
            time.sleep(600)
        return "forked"
    if kind == "die":
        sys.stderr.write("the till is broken\n")
        sys.stderr.flush()
        os._exit(3)
    print("this is no message", flush=True)  # on the channel of the messages
    return ",".join(sorted(os.environ)) if kind == "environment" else "x" * int(kind)


@server.tool()
def look(data: str) -> list[Any]:
    """Look."""
    return ["this", ImageContent(data=data, mime_type="image/png")]


if __name__ == "__main__":
    server.run(transport="stdio")
