"""The orders in which legs can run: one module per order, with its `ORDER`. A contract names its module (`Contract.order`)."""

from __future__ import annotations

from importlib import import_module

from pdproxy.serving.dispatch.attempt import Order


def load(name: str) -> Order:
    """Return the order that a contract names.

    Raises:
        LookupError: there is no such module here: a defect of the contract.
    """
    try:
        order = import_module(f"{__name__}.{name}").ORDER
    except (ImportError, AttributeError) as error:
        raise LookupError(f"no order named {name!r} in {__name__}") from error
    assert isinstance(order, Order)
    return order
