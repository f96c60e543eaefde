"""What may a line for /v1/score or /v1/rerank hold? How well do texts answer others?"""

from typing import Annotated

from pydantic import BeforeValidator, Field, StrictBool, StrictInt

from service.bodies.parameters import Body, Part, Text, Truncate

Texts = Annotated[list[Text], Field(min_length=1)]


class ScoreBody(Body):
    """POST /v1/score. Texts are always lists; each side stands under one of its two names."""

    text_1: Texts | None = None
    queries: Texts | None = None
    text_2: Texts | None = None
    documents: Texts | None = None
    truncate: Truncate = None

    @property
    def pairs(self) -> list[tuple[str, str]]:
        """The texts that are scored against each other, in the answer's order."""
        first, second = self.first, self.second
        return list(zip(first * len(second) if len(first) == 1 else first, second, strict=True))

    @property
    def first(self) -> list[str]:
        """The texts of the first side: as many as of the second, or one for all of them."""
        return self.text_1 or self.queries or []

    @property
    def second(self) -> list[str]:
        """The texts of the second side."""
        return self.text_2 or self.documents or []

    @property
    def names(self) -> tuple[str, str]:
        """Under which names the client wrote the sides."""
        return (
            "queries" if self.text_1 is None else "text_1",
            "documents" if self.text_2 is None else "text_2",
        )


class Document(Part):
    """One text to be ranked, as an object."""

    text: Text


def _document(value: object) -> object:
    return {"text": value} if isinstance(value, str) else value


class RerankBody(Body):
    """POST /v1/rerank."""

    query: Text
    documents: Annotated[list[Annotated[Document, BeforeValidator(_document)]], Field(min_length=1)]
    top_n: Annotated[StrictInt, Field(ge=1)] | None = None
    return_documents: StrictBool | None = None
    truncate: Truncate = None

    @property
    def pairs(self) -> list[tuple[str, str]]:
        """The query with each document."""
        return [(self.query, text) for text in self.second]

    @property
    def first(self) -> list[str]:
        """The query, one for all documents."""
        return [self.query]

    @property
    def second(self) -> list[str]:
        """The documents."""
        return [document.text for document in self.documents]

    @property
    def names(self) -> tuple[str, str]:
        """Under which names the client wrote the sides."""
        return "query", "documents"
