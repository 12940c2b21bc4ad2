"""Fields of bodies for sampling parameters, made from their table."""

from typing import Annotated, Any

from pydantic import BeforeValidator, Field

from shared.sampling import Parameter, TokenBias

_TokenId = Annotated[int, Field(ge=0, lt=2**31)]
TokenIds = Annotated[list[_TokenId], Field(fail_fast=True)]


def _number(kind: type, parameter: Parameter) -> Any:
    """The type of numbers within a parameter's bounds."""
    bounds = Field(
        ge=parameter.minimum,
        le=parameter.maximum,
        lt=parameter.below,
        allow_inf_nan=False if kind is float else None,
    )
    return Annotated[kind, bounds]


def _biases(parameter: Parameter) -> Any:
    most = parameter.max_entries
    assert most is not None

    def few(biases: Any) -> Any:
        """Refuse too many entries before each is validated."""
        if isinstance(biases, dict) and len(biases) > most:
            raise ValueError(f"at most {most} tokens can have a bias")
        return biases

    token = Annotated[str, Field(pattern=r"^(0|[1-9][0-9]{0,9})$")]
    mapping: Any = dict
    return Annotated[
        mapping[token, _number(float, parameter)],
        Field(max_length=most, json_schema_extra={"additionalProperties": False}),
        BeforeValidator(few),
    ]


def sampling_field(parameter: Parameter) -> tuple[Any, Any]:
    """Type and default of the field for a sampling parameter."""
    if parameter.kind == tuple[TokenBias, ...]:
        kind = _biases(parameter)
    elif parameter.kind == tuple[int, ...]:
        kind = Annotated[TokenIds, Field(max_length=parameter.max_entries)]
    elif parameter.kind is bool:
        kind = bool
    else:
        kind = _number(parameter.kind, parameter)
    return kind | None, Field(None, description=parameter.description)
