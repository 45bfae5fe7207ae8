/**
 * Offers tools to a <a href="https://pypi.org/project/toolbus/">toolbus</a>, and calls them: plugins and hosts on grpc-java.
 *
 * <p>A {@link dev.toolbus.Plugin} offers tools, and a {@link dev.toolbus.ToolScope} is a call as its handler sees it. A
 * {@link dev.toolbus.Host} lists and calls tools; a {@link dev.toolbus.Call} is one that is about to be made, a
 * {@link dev.toolbus.Result} what became of it. The messages of the protocol, such as {@code Tool}, are in
 * {@code dev.toolbus.pb}: their fields have the names and meanings of the Python library.
 */
package dev.toolbus;
