-- KEYS[1] meta  [2] due  [3] ended  [4] buckets
-- ARGV[1] owner  [2] prefix of other keys
-- Gives the mark, and unless there is none its seal and its format. HDEL comes first, because a script that has written is not stopped
-- by a full memory.
redis.call('HDEL', KEYS[1], 'cleared')
redis.call('HSET', KEYS[1], 'owner', ARGV[1])
local found = mark()
if not found[1] then
  return found
end

-- Each job has a time and a record. So many buckets are counted in less than a tenth of a second; of more a loss is seen
-- when one of their jobs is looked for.
if redis.call('SCARD', KEYS[4]) <= 100000 then
  local records = 0
  for _, bucket in ipairs(redis.call('SMEMBERS', KEYS[4])) do
    records = records + redis.call('HLEN', ARGV[2] .. 'job:' .. bucket)
  end
  if records ~= redis.call('ZCARD', KEYS[2]) + redis.call('ZCARD', KEYS[3]) then
    return without_mark()
  end
end
found[3] = redis.call('HGET', KEYS[1], 'seal')
found[4] = redis.call('HGET', KEYS[1], 'format')
return found
