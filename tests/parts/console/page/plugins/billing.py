"""Offers tools that fail, each in another way, to a console that has to show it; run by `toolbus run`."""

from __future__ import annotations

import asyncio
import logging
import os

from toolbus import Plugin
from toolbus.sdk import Err

logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s: %(message)s")
log = logging.getLogger("billing")
plugin = Plugin("billing", max_in_flight=2)


@plugin.tool(destructive=True)
def charge_card(customer: str, amount: float, currency: str = "EUR") -> Err:
    """Charges the card of a customer.

    Args:
        customer: number of the customer, such as C-1042.
        amount: what to charge, in the currency.
        currency: three letters, as ISO 4217 has them.
    """
    log.warning("charging %.2f %s from %s", amount, currency, customer)
    return Err("the bank declined the card: insufficient funds")


@plugin.tool(timeout=0.25, read_only=True)
async def export_ledger(year: int) -> str:
    """Exports the ledger of a year as a spreadsheet."""
    log.info("exporting %d", year)
    await asyncio.sleep(60)
    return "ledger.xlsx"


@plugin.tool
def render_invoice(number: int) -> str:
    """Renders an invoice as a PDF."""
    log.error("renderer: \x1b[31mout of memory\x1b[0m while drawing invoice %d", number)
    os._exit(3)


@plugin.tool(timeout=20)
async def print_slip(number: int) -> str:
    """Prints a slip on the printer at the desk, one after the other."""
    log.info("printing slip %d", number)
    await asyncio.sleep(0.3)
    return f"slip {number} is printed"
