// Unregister
spindle.unregisterTool('search_knowledge_base')
