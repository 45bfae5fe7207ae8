from plugin.sdk.plugin import Err, NekoPluginBase, SdkError, lifecycle, plugin


@plugin
class Raises(NekoPluginBase):
    @lifecycle(id="startup")
    async def startup(self, **_):
        return Err(SdkError("no key"))
