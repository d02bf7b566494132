const a = document.createElement("a")
a.href = URL.createObjectURL(new Blob([yaml.value], {type: "application/yaml"}))
a.download = "scenario-" + name + ".yaml"
a.click(); URL.revokeObjectURL(a.href)
