//! `modelrelay up` from the view of a new user: what it finds, what it prints, how it ends; and the programs inside it.

mod one_program;
mod rig;
mod start;
mod stop;
