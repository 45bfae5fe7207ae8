"""Uses what plugins use most: configuration, store, files, texts, a router, a timer, and what only that system has."""

import asyncio

from plugin.plugins.diary import words
from plugin.sdk.plugin import (
    NekoPluginBase,
    Ok,
    SdkError,
    before_entry,
    lifecycle,
    llm_tool,
    message,
    neko_plugin,
    plugin_entry,
    timer_interval,
    tr,
    ui,
    unwrap_or,
)

from .parts.pages import PagesRouter
from .words import TITLE

assert words.TITLE is TITLE


@neko_plugin
class DiaryPlugin(NekoPluginBase):
    def __init__(self, ctx):
        super().__init__(ctx)
        self.logger = ctx.logger
        self.pages = PagesRouter()
        self.include_router(self.pages)
        self.ticks = 0
        self.ticked = asyncio.Event()
        self.events = []
        self.changes = []
        self.logger.info("made in {} for {id}", self.config_dir.name, id=self.plugin_id)

    @lifecycle(id="startup")
    async def startup(self, **_):
        cfg = await self.config.dump(timeout=5.0)
        self.greeting = cfg["diary"]["greeting"]
        self.events.append("startup")
        self.register_llm_tool(
            name="diary_title",
            description="Tells the title.",
            parameters={"type": "object", "properties": {}},
            handler=self._title,
            timeout=10.0,
        )
        return Ok({"status": "ready"})

    async def _on_command_loop_start(self):
        self.events.append("loop")

    @lifecycle(id="shutdown")
    async def shutdown(self, **_):
        self.events.append("shutdown")
        return Ok({"status": "stopped"})

    @lifecycle(id="config_change")
    async def on_config_change(self, old_config, new_config, mode="", **_):
        self.events.append("config_change")
        self.changes.append((old_config, new_config, mode))

    @timer_interval(id="tick", seconds=1, auto_start=True)
    async def tick(self, **_):
        self.ticks += 1
        self.ticked.set()

    @llm_tool(
        name="write_page",
        description=tr("tools.write", default="Writes a page."),
        parameters={
            "type": "object",
            "properties": {"number": {"type": "integer"}, "text": {"type": "string"}},
            "required": ["number", "text"],
        },
        timeout=600.0,
        reply_tail=True,
    )
    async def write_page(self, *, number, text, **_):
        (await self.store.set(f"page:{number}", {"text": f"{self.greeting}, {text}"})).raise_for_err()
        self.data_path("last.txt").write_text(text, encoding="utf-8")
        self.push_message(visibility=["chat"], parts=[{"type": "text", "text": "written"}])
        self.report_status({"written": number})
        return Ok({"title": self.i18n.t("page.title", locale="de", number=number)})

    @ui.action(label=tr("actions.read", default="Read"))
    @plugin_entry(id="read_page", name="Read", llm_result_fields=["text"])
    @llm_tool(name="read_page", description="Reads a page.", parameters={"type": "object", "properties": {}})
    async def read_page(self, *, number=1, **_):
        return await self.pages.read(number)

    @llm_tool(name="read_page")
    async def read_again(self, **_):
        return "never offered"

    @llm_tool(name="ask_others", description="Needs what is not there.", parameters={"type": "object"})
    async def ask_others(self, **_):
        return await self.plugins.call_entry("weather:get_weather", {"city": "Oslo"})

    @plugin_entry(id="pages", name="Pages")
    async def list_pages(self, **_):
        return Ok(unwrap_or(await self.store.keys("page:"), []))

    @message(id="on_text", source="chat")
    async def on_text(self, text, **_):
        raise SdkError("nobody calls it")

    @before_entry(target="*")
    async def before(self, **_):
        return None

    async def _title(self, **_):
        return TITLE
