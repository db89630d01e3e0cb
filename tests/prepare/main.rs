//! `kdscore prepare` as a user runs it: the real binary on small files.

mod bench;
mod broken;
mod corpus;
mod examples;
mod families;
mod files;
mod fuzz;
mod nasty;
mod rows;
mod told;
