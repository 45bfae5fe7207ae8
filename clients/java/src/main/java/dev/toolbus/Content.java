package dev.toolbus;

import com.google.protobuf.ByteString;
import dev.toolbus.pb.*;

/** Makes parts of content: what JSON cannot hold. */
public final class Content {
    private Content() {}

    /** Returns a part that holds plain text. */
    public static ContentBlock text(String text) {
        return ContentBlock.newBuilder().setText(TextContent.newBuilder().setText(text)).build();
    }

    /** Returns a part that holds a picture, from its encoded bytes (not base64) and their type, such as image/png. */
    public static ContentBlock image(byte[] data, String mimeType) {
        ImageContent.Builder image = ImageContent.newBuilder().setData(ByteString.copyFrom(data)).setMimeType(mimeType);
        return ContentBlock.newBuilder().setImage(image).build();
    }

    /** Returns a part that holds a sound, from its encoded bytes and their type, such as audio/wav. */
    public static ContentBlock audio(byte[] data, String mimeType) {
        AudioContent.Builder audio = AudioContent.newBuilder().setData(ByteString.copyFrom(data)).setMimeType(mimeType);
        return ContentBlock.newBuilder().setAudio(audio).build();
    }

    /** Returns a part that holds a file: its address, its bytes and their type. */
    public static ContentBlock file(String uri, byte[] data, String mimeType) {
        EmbeddedResource.Builder file = EmbeddedResource.newBuilder().setUri(uri).setMimeType(mimeType)
                .setData(ByteString.copyFrom(data));
        return ContentBlock.newBuilder().setResource(file).build();
    }

    /** Returns a part that is a link to something that can be read elsewhere. */
    public static ContentBlock link(String uri, String name) {
        return ContentBlock.newBuilder().setResourceLink(ResourceLink.newBuilder().setUri(uri).setName(name)).build();
    }

    /** Returns what a model sees of a part: its text, or what it is. */
    public static String show(ContentBlock part) {
        return switch (part.getKindCase()) {
            case TEXT -> part.getText().getText();
            case IMAGE -> "[image: " + part.getImage().getMimeType() + ", " + part.getImage().getData().size() + " bytes]";
            case AUDIO -> "[audio: " + part.getAudio().getMimeType() + ", " + part.getAudio().getData().size() + " bytes]";
            case RESOURCE_LINK -> "[" + part.getResourceLink().getName() + ": " + part.getResourceLink().getUri() + "]";
            case RESOURCE -> switch (part.getResource().getBodyCase()) {
                case TEXT -> part.getResource().getText();
                case DATA -> "[resource: " + part.getResource().getUri() + ", " + part.getResource().getData().size()
                        + " bytes]";
                default -> "[resource: " + part.getResource().getUri() + "]";
            };
            default -> "";
        };
    }
}
