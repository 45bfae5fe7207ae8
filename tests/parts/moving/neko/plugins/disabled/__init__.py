from plugin.sdk.plugin import NekoPluginBase, plugin


@plugin
class Disabled(NekoPluginBase): ...
