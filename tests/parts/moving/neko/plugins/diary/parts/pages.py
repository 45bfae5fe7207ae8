"""A part of the plugin, which imports upwards as well."""

from plugin.sdk.plugin import Err, Ok, SdkError, plugin_entry
from plugin.sdk.shared.core.router import PluginRouter

from ..words import TITLE


class PagesRouter(PluginRouter):
    def __init__(self):
        super().__init__(prefix="pages_", tags=["pages"])

    @plugin_entry(id="count", name="Count")
    async def count(self, **_):
        return Ok({"pages": len((await self.store.keys("page:")).unwrap())})

    async def read(self, number):
        found = await self.store.get(f"page:{number}")
        if found.is_err() or found.value is None:
            return Err(SdkError(f"no page {number}", code="NO_PAGE"))
        self.logger.info("page {} of {title} is read", number, title=TITLE)
        return found
