from plugin.sdk.plugin import NekoPluginBase, llm_tool, plugin

from .helper import double


@plugin
class Own(NekoPluginBase):
    @llm_tool(name="double", description="Doubles a number.")
    def double(self, number: int) -> int:
        return double(number)
