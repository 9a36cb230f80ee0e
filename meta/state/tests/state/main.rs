//! The state machines as their callers see them: stories, and random histories checked after every command.
