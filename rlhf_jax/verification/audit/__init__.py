"""Programs that a code verifier must reward, and cheats that it must not."""
