pub mod scaling;
