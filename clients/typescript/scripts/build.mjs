// Compiles the package to dist/ (ES modules and CommonJS), and the tests and the client under test to build/.
import { execFileSync } from "node:child_process";
import { mkdirSync, rmSync, writeFileSync } from "node:fs";
import { createRequire } from "node:module";

const tsc = createRequire(import.meta.url).resolve("typescript/bin/tsc");
const compile = (...options) => execFileSync(process.execPath, [tsc, ...options], { stdio: "inherit" });

for (const folder of ["dist", "build"]) rmSync(folder, { recursive: true, force: true });
compile("-p", "tsconfig.build.json", "--outDir", "dist/esm");
compile("-p", "tsconfig.build.json", "--outDir", "dist/cjs", "--module", "CommonJS", "--moduleResolution", "Node10");
mkdirSync("dist/cjs", { recursive: true });
writeFileSync("dist/cjs/package.json", '{ "type": "commonjs" }\n');
compile("-p", "tsconfig.json");
