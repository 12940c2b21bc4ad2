"""Pages of lists, as OpenAI's API has them."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from fastapi import Request

from gateway.http.errors import invalid_value


@dataclass(frozen=True, slots=True)
class PageQuery:
    """Which page of a list is asked for.

    Attributes:
        newest_first: the order of the list.
        after: id of the item before the page; None: the page is the first.
    """

    limit: int
    newest_first: bool
    after: str | None

    def behind(self, ids: Sequence[str]) -> list[str]:
        """What follows ``after``, in the order that is asked for.

        Args:
            ids: of all items, the oldest first.

        Raises:
            ApiError: 400, no item has the id ``after``.
        """
        ordered = list(ids[::-1] if self.newest_first else ids)
        if self.after is None:
            return ordered
        if self.after not in ordered:
            raise invalid_value("after", self.after, "no item has this id")
        return ordered[ordered.index(self.after) + 1 :]


def page_query(request: Request, few: int, most: int) -> PageQuery:
    """The page that a call asks for.

    Args:
        few: items on a page by default.
        most: items that a page may have.

    Raises:
        ApiError: 400.
    """
    query = request.query_params
    order = query.get("order", "desc")
    if order not in ("asc", "desc"):
        raise invalid_value("order", order, "must be asc or desc")
    limit = query.get("limit", str(few))
    if not (limit.isascii() and limit.isdigit() and 1 <= int(limit[:6]) <= most):
        raise invalid_value("limit", limit, f"must be 1 to {most}")
    return PageQuery(int(limit), order == "desc", query.get("after"))


def shown_page(items: Sequence[dict[str, Any]], has_more: bool) -> dict[str, Any]:
    """The body of a page."""
    return {
        "object": "list",
        "data": items,
        "first_id": items[0]["id"] if items else None,
        "last_id": items[-1]["id"] if items else None,
        "has_more": has_more,
    }
