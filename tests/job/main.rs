//! The main job through the real program, on the teacher that comes with kdscore.

mod bad_teacher;
mod checkpoint;
mod context;
mod determinism;
mod diff;
mod golden;
mod interrupted;
mod kill;
mod memory;
mod oracle;
mod program;
mod quickstart;
