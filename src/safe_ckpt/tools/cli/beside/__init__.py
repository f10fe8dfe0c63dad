"""Commands that go on beside a live job."""
