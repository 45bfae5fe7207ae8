"""Holds what is offered, by which source, for which role, and who may see it.

A *handler* runs tools. A *declaration* is how a source declares a tool, with the handlers that offer it so. An *entry*
is what one role has under one name; a *role table* holds the entries of a role, and the *registry* all role tables. A
*listing* is one line of the catalog, as it is shown; the *catalog view* shows a caller the listings that the *policy*
lets it call. The registry takes *compiled tools* in, and reports *changes*.
"""
