"""Who has the floor of a realtime session: whether results can be sent, and whether the model is asked to go on.

Pure state; `RealtimeSession` tells it what the provider says, and does what it allows. A provider begins one response
at a time: by itself when the user stops speaking, or when it is asked to. So nobody asks while the user speaks, and a
request that came too late (the provider had begun a response of its own) is made again after that response.
"""

from __future__ import annotations


class Floor:
    """The state of one session."""

    def __init__(self) -> None:
        self.speaking = False  # whether the user is
        self.pausing = False  # whether the user has just stopped: the provider may begin a response by itself
        self._announces = False  # whether the provider says when a response begins; OpenAI does, Gemini does not
        self._asking = False  # whether the model was asked to go on and has not begun to
        self._may_be_refused = False  # whether that request may still be: no response has ended since
        self._busy = False  # whether the provider refused it for a response which is not over
        self._owing = False  # whether results were sent without asking the model to go on

    @property
    def takes_results(self) -> bool:
        """Whether results can be sent, as far as no response is known to be under way."""
        return not (self._asking or self._busy or self.pausing)

    @property
    def owes_request(self) -> bool:
        """Whether the model is to be asked to go on, with results that it has already."""
        return self._owing and self.takes_results and not self.speaking

    def sends(self) -> bool:
        """Results, or a request that was owed, are being sent. Returns whether the model is asked to go on."""
        go_on = not self.speaking
        self._owing = not go_on
        self._asking = go_on and self._announces
        self._may_be_refused = go_on
        return go_on

    def failed(self) -> None:
        """What was being sent could not be."""
        self._asking = self._may_be_refused = False

    def began(self) -> None:
        """A response began, with all results that were sent. The user's turn is over, whether that was said or not."""
        self._announces = True
        self._asking = self._busy = self._owing = self.speaking = self.pausing = False

    def ended(self) -> None:
        """A response is over."""
        self._busy = self._may_be_refused = False

    def refused(self) -> None:
        """The provider begins no response while one is under way. Where our request was meant, it is owed again."""
        if self._may_be_refused:
            self._asking = self._may_be_refused = False
            self._busy = self._owing = True

    def speech_began(self) -> None:
        """The user speaks."""
        self.speaking, self.pausing = True, False

    def speech_ended(self) -> bool:
        """The user stopped, or what was said is thrown away. Returns whether that is news: a pause begins."""
        news, self.speaking = self.speaking, False
        self.pausing = self.pausing or news
        return news

    def paused(self) -> None:
        """The provider had time to begin a response by itself."""
        self.pausing = False
