"""The examples of the documents of N.E.K.O., with what stands for their dots."""

from plugin.sdk.plugin import NekoPluginBase, llm_tool, neko_plugin

ANY_TEXT = {"type": "object", "properties": {"query": {"type": "string"}}, "required": ["query"]}


@neko_plugin
class SearchPlugin(NekoPluginBase):
    def __init__(self, ctx):
        super().__init__(ctx)
        self.register_llm_tool(
            name="custom_tool",
            description="Look something up.",
            parameters=ANY_TEXT,
            handler=self.look_up,
            timeout=30.0,
            role=None,
        )

    @llm_tool(name="search", parameters=ANY_TEXT)
    async def search(self, *, query: str, limit: int = 10):
        return [query] * min(limit, 2)

    async def look_up(self, *, query: str):
        return {"output": {"reason": "city not found"}, "is_error": True, "error": "CITY_NOT_FOUND"}
