"""For those who come from N.E.K.O., Stargazer, Spindle or Synchronet: their plugins, registries and servers."""
