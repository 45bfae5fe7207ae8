"""Tracks turn taking in a realtime session: whether results can be sent, and whether to request a response to them.

Pure state: `RealtimeSession` reports the provider's events and sends what the state allows. A provider begins one
response at a time: by itself when the user stops speaking, or on request. So no response is requested while the user
speaks, and a request that came too late (the provider had begun a response by itself) is repeated after that response.
"""

from __future__ import annotations

from toolbus.dialects.dialect import ToolChoice


class TurnTaking:
    """The state of one session."""

    def __init__(self) -> None:
        self.user_speaking = False
        self.pausing = False  # whether the user has just stopped: the provider may begin a response by itself
        self._announces = False  # whether the provider reports the begin of a response; OpenAI does, Gemini does not
        self._requested = False  # whether a response was requested and has not begun
        self._may_be_refused = False  # whether that request may still be refused: no response has ended since
        self._busy = False  # whether the provider refused it because of a response that has not ended
        self._request_due = False  # whether a response is still to be requested: to results, or by the program
        self._choice: ToolChoice = "auto"  # of the next request
        self._sent_choice: ToolChoice = "auto"  # of the last request, which may be refused

    @property
    def can_send_results(self) -> bool:
        """Whether results can be sent, provided that no response is known to be in progress."""
        return not (self._requested or self._busy or self.pausing)

    @property
    def can_request_response(self) -> bool:
        """Whether to request a response to results that were sent before."""
        return self._request_due and self.can_send_results and not self.user_speaking

    def start_sending(self) -> bool:
        """Results, or a due request, are being sent. Returns whether to request a response."""
        request = not self.user_speaking
        self._request_due = not request
        self._requested = request and self._announces
        self._may_be_refused = request
        return request

    def request_response(self, choice: ToolChoice) -> None:
        """The program wants a response; with a choice, one that the provider begins by itself does not do."""
        self._choice, self._request_due = choice, True

    def take_choice(self) -> ToolChoice:
        """Returns the choice of the request that is being sent."""
        self._sent_choice, self._choice = self._choice, "auto"
        return self._sent_choice

    def sending_failed(self) -> None:
        """The results or the request could not be sent."""
        self._requested = self._may_be_refused = False

    def response_began(self) -> None:
        """A response began, with all results that were sent. The user's speech is over, even if not reported."""
        self._announces = True
        self._requested = self._busy = self.user_speaking = self.pausing = False
        self._request_due = self._choice != "auto"

    def response_ended(self) -> None:
        """A response is over."""
        self._busy = self._may_be_refused = False

    def request_refused(self) -> None:
        """The provider refused a request because of a response in progress. A request of this side is due again."""
        if self._may_be_refused:
            self._requested = self._may_be_refused = False
            self._busy = self._request_due = True
            if self._choice == "auto":
                self._choice = self._sent_choice

    def speech_began(self) -> None:
        """The user speaks."""
        self.user_speaking, self.pausing = True, False

    def speech_ended(self) -> bool:
        """The user stopped, or the audio buffer was cleared. Returns whether a pause begins."""
        was_speaking, self.user_speaking = self.user_speaking, False
        self.pausing = self.pausing or was_speaking
        return was_speaking

    def pause_ended(self) -> None:
        """The provider had time to begin a response by itself."""
        self.pausing = False
