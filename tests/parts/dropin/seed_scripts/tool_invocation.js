spindle.on('TOOL_INVOCATION', async (payload) => {
  const { toolName, args, councilMember, contextMessages } = payload

  if (toolName === 'search_knowledge_base') {
    const results = await searchMyKnowledgeBase(args.query, args.limit)

    // Inspect the structured chat context if you need role boundaries
    const lastAssistant = contextMessages
      ?.filter(m => m.role === 'assistant')
      .pop()

    // When invoked via council, tailor the output to the assigned member's voice
    if (councilMember) {
      return `${councilMember.name} (${councilMember.role || 'analyst'}) reports:\n` +
        results.map(r => r.summary).join('\n')
    }

    return results.map(r => r.summary).join('\n')
  }

  return 'Unknown tool'
})
