//! `modelrelay up`, as a new user meets it: what it finds, what it prints, how it ends; and the programs inside it.

mod one_program;
mod rig;
mod start;
mod stop;
