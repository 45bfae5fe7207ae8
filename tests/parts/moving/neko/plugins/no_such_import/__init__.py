from plugin.sdk.plugin import NekoPluginBase
from utils.config_manager import get_config_manager


class Broken(NekoPluginBase):
    manager = get_config_manager()
